"""Short names of protobuf enum values, for command output, metrics and JSON."""

from __future__ import annotations

import functools

from google.protobuf.descriptor import EnumDescriptor

from baton.v1 import common_pb2


@functools.lru_cache(maxsize=256)
def enum_name(enum: EnumDescriptor, number: int) -> str:
    """Short name of an enum value: "prefill" for ROLE_PREFILL.

    Args:
        enum: Descriptor of the enum, such as `common_pb2.Role.DESCRIPTOR`.
        number: Value. A number unknown here (sent by a newer version) is returned as digits.
    """
    known = enum.values_by_number.get(number)
    if known is None:
        return str(number)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return known.name.removeprefix(prefix).lower()


def role_name(role: common_pb2.Role.ValueType) -> str:
    """Name of a role, such as "prefill"."""
    return enum_name(common_pb2.Role.DESCRIPTOR, role)


def lane_name(lane: common_pb2.Lane.ValueType) -> str:
    """Name of a lane as in the configuration, such as "interactive"."""
    return enum_name(common_pb2.Lane.DESCRIPTOR, lane)
