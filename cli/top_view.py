"""Draws the screen of `baton top`: one cell at one moment, for a given terminal size."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli import top_tables
from baton.cli.top_tables import BAD, DIM, GOOD, HEAD
from baton.client.watcher import View
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import role_name
from baton.v1 import admin_pb2

# Terminals with at least this many columns show workers and decisions side by side.
_WIDE = 120
_MIN_WORKERS, _MAX_DECISIONS = 3, 3


def draw(
    view: View | None, *, addresses: str, problem: str, age_s: float, width: int, height: int
) -> RenderableType:
    """Draws a whole screen with at most `height` lines of at most `width` characters.

    Args:
        view: The latest view; None before the first one.
        addresses: Coordinator addresses that were tried.
        problem: Error of the last update; empty if it succeeded.
        age_s: Age of the view in seconds.
        width: Columns of the terminal.
        height: Rows of the terminal; 0 for as many rows as needed.
    """
    if view is None:
        return _without_view(addresses, problem, width, height)
    top: list[RenderableType] = [_header(view, width), _health(view, problem, age_s, width)]
    top += [
        Text(""),
        top_tables.pools(view.status, width),
        Text(""),
        top_tables.lanes(view.status, width),
    ]
    num_lanes = max(1, len(view.status.lanes))
    num_top = 2 + 1 + 1 + max(1, len(view.status.pools)) + 1 + 1 + 2 * num_lanes
    # Two lines are taken by the empty line before the lower part and by the footer.
    room = max(_MIN_WORKERS, height - num_top - 2)
    if not height:
        room = len(view.status.workers) + _MAX_DECISIONS + 3
    footer = _line([("q", "bold"), (" quit   ", ""), (f"{_window(view)} s window", DIM)], width)
    if width >= _WIDE:
        sides = Table.grid(expand=True, padding=(0, 3, 0, 0))
        sides.add_column(ratio=1)
        sides.add_column(ratio=1)
        half = (width - 3) // 2
        sides.add_row(
            top_tables.workers(view.status, room - 1, half), _decisions(view, room - 1, half)
        )
        lower: list[RenderableType] = [sides]
        num_decisions = max(1, min(len(view.decisions or ()), room - 1))
        num_lower = max(_rows(len(view.status.workers), room - 1), 1 + num_decisions)
    else:
        num_decisions = min(_MAX_DECISIONS, max(1, len(view.decisions or ())))
        num_workers = max(_MIN_WORKERS, room - num_decisions - 3)
        lower = [
            top_tables.workers(view.status, num_workers, width),
            Text(""),
            _decisions(view, num_decisions, width),
        ]
        num_lower = _rows(len(view.status.workers), num_workers) + 1 + 1 + num_decisions
    filler = [Text("")] * max(0, height - num_top - 1 - num_lower - 1)
    return Group(*top, Text(""), *lower, *filler, footer)


def _without_view(addresses: str, problem: str, width: int, height: int) -> RenderableType:
    lines = [_line([("baton", HEAD), (f"  {addresses}", "")], width)]
    if problem:
        lines.append(_line([("disconnected  ", BAD), (problem, "")], width))
        lines += [Text(""), _line([("retrying; press q to quit", DIM)], width)]
    else:
        lines.append(_line([("connecting ...", DIM)], width))
    return Group(*lines, *[Text("")] * max(0, height - len(lines)))


def _header(view: View, width: int) -> Text:
    up_s = to_seconds(view.status.uptime)
    model = view.status.model.name or "-"
    return _line(
        [
            ("baton", HEAD),
            (f"  {view.address}", ""),
            (f"   model {model}", ""),
            (f"   up {_span(up_s)}", ""),
            (_hits(view.status.prompt_tokens), ""),
        ],
        width,
    )


def _hits(found: admin_pb2.PromptTokens) -> str:
    """Share of the prompt tokens that came from a cache, and the parts not from the device."""
    hits = found.device + found.host + found.disk + found.fetched
    total = hits + found.computed
    if not total:
        return ""
    parts = [
        f"{name} {count / total:.0%}"
        for name, count in (
            ("host", found.host),
            ("disk", found.disk),
            ("fetched", found.fetched),
        )
        if count
    ]
    sources = f" ({', '.join(parts)})" if parts else ""
    return f"   hits {hits / total:.0%}{sources}"


def _health(view: View, problem: str, age_s: float, width: int) -> Text:
    if problem:
        text = f"  {problem}; the state below is from {_span(age_s)} ago"
        return _line([("disconnected", BAD), (text, "")], width)
    if not view.findings and not view.status.workers:
        return _line([("no workers serve", BAD)], width)
    if not view.findings:
        return _line([("healthy", GOOD)], width)
    more = f" (+{len(view.findings) - 1})" if len(view.findings) > 1 else ""
    first = view.findings[0]
    return _line([(f"{first.kind}{more}", BAD), (f"  {first.what}", "")], width)


def _decisions(view: View, room: int, width: int) -> RenderableType:
    title = Text("LAST SCALE EVENTS", style=DIM)
    if view.decisions is None:
        return Group(title, Text("these pools are not autoscaled", style=DIM))
    if not view.decisions:
        return Group(title, Text("none yet", style=DIM))
    now_s = to_seconds(view.status.at)
    lines = []
    for one in view.decisions[:room]:
        ago = _span(max(0.0, now_s - to_seconds(one.at)))
        role = role_name(one.role)
        size = f"{role} {one.from_workers} → {one.to_workers}"
        lines.append(
            _line([(f"{ago:>7} ago  ", DIM), (size, HEAD), (f"  {one.reason}", "")], width)
        )
    return Group(title, *lines)


def _line(parts: Sequence[tuple[str, str]], width: int) -> Text:
    text = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


def _rows(num: int, room: int) -> int:
    """Number of lines of a list with its title."""
    return 1 + min(max(1, num), room) if num else 1


def _window(view: View) -> str:
    return f"{to_seconds(view.status.window):.0f}"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
