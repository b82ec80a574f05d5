"""Tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal, cast

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.runtime.enum_names import enum_name


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One line, at once: for those who follow."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """A rich table on a terminal, plain aligned columns elsewhere; `empty` when there are no rows.

    A column whose name begins with ">" is aligned right. On a terminal that is too narrow the last
    column is wrapped before any other is cut.
    """
    if not rows:
        print(empty)
        return
    names = [column.removeprefix(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for number, (name, is_right) in enumerate(zip(names, right, strict=True), start=1):
            justify: Literal["left", "right"] = "right" if is_right else "left"
            table.add_column(name, justify=justify, no_wrap=number < len(names))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console(highlight=False).print(table)
        return
    widths = [max(len(row[index]) for row in (names, *rows)) for index in range(len(names))]
    for row in (names, *rows):
        cells = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        print("  ".join(cells).rstrip())


def plain(message: Message) -> dict[str, Any]:
    """A message as values for JSON, every field present.

    Enums are their names in lower case without the type's prefix, durations seconds (the key gains
    `_s`), timestamps ISO 8601, fixed64 (random ids) 16 hexadecimal digits, absent messages null.
    """
    fields = cast("Sequence[FieldDescriptor]", message.DESCRIPTOR.fields)
    return dict(_plain_field(message, field) for field in fields)


def _plain_field(message: Message, field: FieldDescriptor) -> tuple[str, Any]:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of_value = field.message_type.fields_by_name["value"]
        return field.name, {str(key): _plain_value(of_value, value[key]) for key in sorted(value)}
    name = field.name
    if field.message_type is duration_pb2.Duration.DESCRIPTOR:
        name += "_s"
    if field.is_repeated:
        return name, [_plain_value(field, item) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return name, None
    return name, _plain_value(field, value)


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, duration_pb2.Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, timestamp_pb2.Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_FIXED64:
        return f"{value:016x}"
    return value.hex() if isinstance(value, bytes) else value
