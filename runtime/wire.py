"""Protobuf's encoding, where messages are put together from parts that are encoded already.

Encoded messages one after the other are merged: fields can be added to a message, and entries to a
repeated field, by joining bytes.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _LENGTH = 0, 2
_LAST_OF_ONE_BYTE = 15


def varint_tag(message: Descriptor, name: str) -> int:
    """Of a number or bool field; raises ValueError as `length_tag` does."""
    return _tag(message, name, _VARINT)


def length_tag(message: Descriptor, name: str) -> int:
    """Of a field that is a message, a text or bytes.

    Raises:
        ValueError: its number is above 15, and its tag longer than a byte.
    """
    return _tag(message, name, _LENGTH)


def _tag(message: Descriptor, name: str, wire_type: int) -> int:
    number = message.fields_by_name[name].number
    if number > _LAST_OF_ONE_BYTE:
        raise ValueError(f"{message.name}.{name} has number {number}; at most {_LAST_OF_ONE_BYTE}")
    return number << 3 | wire_type


def field(tag: int, value: int) -> bytes:
    """A field's tag, and its value, or its length, as a varint."""
    # Nearly all have one byte or two.
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
