"""Protobuf's encoding, where messages are put together from parts that are encoded already.

Encoded messages one after the other are merged: fields can be added to a message, and entries to a
repeated field, by joining bytes.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor

_VARINT, _LENGTH = 0, 2


def varint_tag(message: Descriptor, name: str) -> int:
    """Of a number or bool field with a field number below 16."""
    return message.fields_by_name[name].number << 3 | _VARINT


def length_tag(message: Descriptor, name: str) -> int:
    """Of a field that is a message, a text or bytes, with a field number below 16."""
    return message.fields_by_name[name].number << 3 | _LENGTH


def field(tag: int, value: int) -> bytes:
    """A field's tag, and its value, or its length, as a varint."""
    found = bytearray((tag,))
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
