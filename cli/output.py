"""Prints tables for people and JSON for programs."""

from __future__ import annotations

import codecs
import json
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, Literal, cast

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from baton.cli import columns as columns_module
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import enum_name

# Smallest width of the last column, which may wrap, the gap between columns, and both edges of a
# table together, in characters.
_MIN_WRAPPED_WIDTH, _GAP, _EDGES = 24, 3, 2
# Indentation of the further lines of a broken line: spaces, and the mark of a list item.
_INDENT = re.compile(r" *(?:- |\d+\. )?")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=not _encodes_all()))


def print_json_line(value: Any) -> None:
    """Prints a value on one line and flushes, for readers that follow the output."""
    print(json.dumps(value, ensure_ascii=not _encodes_all()), flush=True)


def _encodes_all() -> bool:
    """Whether standard output can encode all characters; JSON escapes them otherwise."""
    return codecs.lookup(sys.stdout.encoding).name.startswith("utf")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str,
    drop_first: Sequence[str] = (),
    left_out_hint: str = "--json prints all",
    *,
    wraps_last: bool = True,
) -> None:
    """Prints a rich table on a terminal, and plain aligned columns elsewhere.

    On a narrow terminal the last column wraps and columns of `drop_first` are left out; a line
    below the table names them. No other column is cut, so that IDs can be copied.

    Args:
        columns: Column titles; a title that begins with ">" is aligned right.
        rows: Rows with one cell per column.
        empty: Text that is printed when there are no rows.
        drop_first: Columns to leave out first on a narrow terminal, in this order.
        left_out_hint: Says where to find the columns that were left out.
        wraps_last: Whether the last column may wrap; False for a column of names.
    """
    if not rows:
        print(empty)
        return
    names = [column.removeprefix(">") for column in columns]
    right = [column.startswith(">") for column in columns]
    widths = [max(len(row[index]) for row in (names, *rows)) for index in range(len(names))]
    if sys.stdout.isatty():
        # Imported only for a terminal: rich takes longer to import than a table takes to print.
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        console = Console(highlight=False)
        needed = list(widths)
        if wraps_last:
            needed[-1] = min(widths[-1], max(_MIN_WRAPPED_WIDTH, len(names[-1])))
        kept = columns_module.fitting(names, needed, drop_first, console.width - _EDGES, _GAP)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for index in kept:
            justify: Literal["left", "right"] = "right" if right[index] else "left"
            no_wrap = index < len(names) - 1 or not wraps_last
            table.add_column(names[index], justify=justify, no_wrap=no_wrap, overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[index]) for index in kept))
        wide = table_width([needed[index] for index in kept])
        # If the table is still too wide, the terminal wraps the lines.
        Console(highlight=False, width=max(wide, console.width)).print(table)
        if left_out := [name for index, name in enumerate(names) if index not in kept]:
            # Two columns may have the same name.
            print(f"columns left out: {', '.join(dict.fromkeys(left_out))} ({left_out_hint})")
        return
    for row in (names, *rows):
        cells = (
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        )
        print("  ".join(cells).rstrip())


def terminal_width() -> int | None:
    """Characters of a line of the terminal; None if standard output is no terminal."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    return max(Console().width, 1)


def table_width(widths: Sequence[int]) -> int:
    """Characters of a line of a table on a terminal, for columns of these widths."""
    return sum(widths) + _GAP * (len(widths) - 1) + _EDGES


def print_text(text: str) -> None:
    """Prints sentences. On a terminal, lines break between words, so that names stay whole.

    A broken line goes on below its first word, or below the text of its list item ("- ").
    """
    width = terminal_width()
    for line in text.split("\n"):
        if width is not None and len(line) > width:
            line = textwrap.fill(
                line,
                width,
                subsequent_indent=_indent(line),
                break_long_words=False,
                break_on_hyphens=False,
            )
        print(line)


def _indent(line: str) -> str:
    found = _INDENT.match(line)
    return " " * len(found[0]) if found else ""


def plain(message: Message) -> dict[str, Any]:
    """Converts a protobuf message to values for JSON, with every field present.

    Enums become their names in lower case without the type's prefix. Durations become seconds, and
    their key gets the suffix `_s`. Timestamps become ISO 8601 text, and fixed64 values (random IDs)
    16 hexadecimal digits. Absent messages and optional fields become null.
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
    if field.has_presence and not message.HasField(field.name):
        return name, None
    return name, _plain_value(field, value)


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, duration_pb2.Duration):
        return to_seconds(value)
    if isinstance(value, timestamp_pb2.Timestamp):
        return value.ToJsonString()
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return enum_name(field.enum_type, value)
    if field.type == FieldDescriptor.TYPE_FIXED64:
        return f"{value:016x}"
    return value.hex() if isinstance(value, bytes) else value
