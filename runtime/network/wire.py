"""Protobuf encoding, for messages that are assembled from encoded parts.

Concatenated encoded messages merge: joining bytes adds fields to a message, or entries to a
repeated field.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _LENGTH = 0, 2
_LAST_OF_ONE_BYTE = 15


def varint_tag(message: Descriptor, name: str) -> int:
    """Tag byte of a number or bool field; raises ValueError like `length_tag`."""
    return _tag(message, name, _VARINT)


def length_tag(message: Descriptor, name: str) -> int:
    """Tag byte of a message, string or bytes field.

    Raises:
        ValueError: The field's number is above 15, so its tag is longer than a byte.
    """
    return _tag(message, name, _LENGTH)


def _tag(message: Descriptor, name: str, wire_type: int) -> int:
    number = message.fields_by_name[name].number
    if number > _LAST_OF_ONE_BYTE:
        raise ValueError(f"{message.name}.{name} has number {number}; at most {_LAST_OF_ONE_BYTE}")
    return number << 3 | wire_type


def field(tag: int, value: int) -> bytes:
    """Encodes a field's tag, followed by its value or its length as a varint."""
    # Nearly all values take one byte or two.
    if value <= 0x7F:
        return bytes((tag, value))
    if value <= 0x3FFF:
        return bytes((tag, value & 0x7F | 0x80, value >> 7))
    found = bytearray((tag,))
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
