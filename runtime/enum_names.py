"""The contract's enums in words: for people, metrics and JSON."""

from __future__ import annotations

import functools

from google.protobuf.descriptor import EnumDescriptor

from baton.v1 import common_pb2


@functools.lru_cache(maxsize=256)
def enum_name(enum: EnumDescriptor, number: int) -> str:
    """The short name of an enum's value: "prefill" for ROLE_PREFILL.

    Args:
        enum: `common_pb2.Role.DESCRIPTOR`.
        number: one that is not known here, as a newer process may send it, stays a number.
    """
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower()


def role_name(role: common_pb2.Role.ValueType) -> str:
    """Such as "prefill"."""
    return enum_name(common_pb2.Role.DESCRIPTOR, role)


def lane_name(lane: common_pb2.Lane.ValueType) -> str:
    """As in the configuration: "interactive"."""
    return enum_name(common_pb2.Lane.DESCRIPTOR, lane)
