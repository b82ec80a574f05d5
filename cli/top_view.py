"""What `baton top` draws: one cell at one moment, on so many columns and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.client.watcher import View
from baton.runtime.enum_names import enum_name, lane_name, role_name
from baton.v1 import admin_pb2, cluster_pb2

# From so many columns on there is room for workers and decisions side by side.
_WIDE = 120
_MIN_WORKERS, _MAX_DECISIONS = 3, 3
_GOOD, _BAD, _DIM, _HEAD = "green", "red", "bright_black", "bold"


def draw(
    view: View | None, *, addresses: str, problem: str, age_s: float, width: int, height: int
) -> RenderableType:
    """A whole screen, no line wider than `width`, no more than `height` of them.

    Args:
        view: the latest; None while there was none.
        addresses: that were asked.
        problem: why there is no newer one; empty when there is.
        age_s: of the view.
        width: columns.
        height: rows; 0 for as many as it takes.
    """
    if view is None:
        return _without_view(addresses, problem, width, height)
    top: list[RenderableType] = [_header(view, width), _health(view, problem, age_s, width)]
    top += [Text(""), _pools(view.status), Text(""), _lanes(view.status, width)]
    num_lanes = max(1, len(view.status.lanes))
    num_top = 2 + 1 + 1 + max(1, len(view.status.pools)) + 1 + 1 + 2 * num_lanes
    # An empty line before what follows, and the footer.
    room = max(_MIN_WORKERS, height - num_top - 2)
    if not height:
        room = len(view.status.workers) + _MAX_DECISIONS + 3
    footer = _line([("q", "bold"), (" quit   ", ""), (f"{_window(view)} s window", _DIM)], width)
    if width >= _WIDE:
        sides = Table.grid(expand=True, padding=(0, 3, 0, 0))
        sides.add_column(ratio=1)
        sides.add_column(ratio=1)
        half = (width - 3) // 2
        sides.add_row(_workers(view.status, room - 1), _decisions(view, room - 1, half))
        lower: list[RenderableType] = [sides]
        num_decisions = max(1, min(len(view.decisions or ()), room - 1))
        num_lower = max(_rows(len(view.status.workers), room - 1), 1 + num_decisions)
    else:
        num_decisions = min(_MAX_DECISIONS, max(1, len(view.decisions or ())))
        num_workers = max(_MIN_WORKERS, room - num_decisions - 3)
        lower = [
            _workers(view.status, num_workers),
            Text(""),
            _decisions(view, num_decisions, width),
        ]
        num_lower = _rows(len(view.status.workers), num_workers) + 1 + 1 + num_decisions
    filler = [Text("")] * max(0, height - num_top - 1 - num_lower - 1)
    return Group(*top, Text(""), *lower, *filler, footer)


def _without_view(addresses: str, problem: str, width: int, height: int) -> RenderableType:
    lines = [_line([("baton", _HEAD), (f"  {addresses}", "")], width)]
    if problem:
        lines.append(_line([("disconnected  ", _BAD), (problem, "")], width))
        lines += [Text(""), _line([("trying again; q quits", _DIM)], width)]
    else:
        lines.append(_line([("connecting ...", _DIM)], width))
    return Group(*lines, *[Text("")] * max(0, height - len(lines)))


def _header(view: View, width: int) -> Text:
    up_s = view.status.uptime.ToNanoseconds() / 1e9
    model = view.status.model.name or "-"
    return _line(
        [
            ("baton", _HEAD),
            (f"  {view.address}", ""),
            (f"   model {model}", ""),
            (f"   up {_span(up_s)}", ""),
        ],
        width,
    )


def _health(view: View, problem: str, age_s: float, width: int) -> Text:
    if problem:
        text = f"  {problem}; below is how it was {_span(age_s)} ago"
        return _line([("disconnected", _BAD), (text, "")], width)
    if not view.findings and not view.status.workers:
        return _line([("nothing is served", _BAD)], width)
    if not view.findings:
        return _line([("healthy", _GOOD)], width)
    more = f" (+{len(view.findings) - 1})" if len(view.findings) > 1 else ""
    first = view.findings[0]
    return _line([(f"{first.kind}{more}", _BAD), (f"  {first.what}", "")], width)


def _table(*columns: str) -> Table:
    """Columns that begin with ">" are aligned right; the last one is cut where there is no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=_DIM)
    for number, column in enumerate(columns, start=1):
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        table.add_column(
            column.removeprefix(">"),
            justify=justify,
            no_wrap=True,
            overflow="ellipsis" if number == len(columns) else "crop",
        )
    return table


def _pools(status: admin_pb2.GetStatusResponse) -> RenderableType:
    table = _table(
        "POOL", ">SERVING", ">STARTING", ">DRAINING", ">WANTED", ">RUNNING", ">WAITING", ">KV USED"
    )
    for pool in status.pools:
        table.add_row(
            role_name(pool.role),
            Text(str(pool.num_serving), style="" if pool.num_serving else _BAD),
            str(pool.num_starting),
            str(pool.num_draining),
            str(pool.desired) if pool.desired else "-",
            str(pool.num_running),
            str(pool.num_waiting),
            _share(pool.kv_tokens_used, pool.kv_tokens_total),
        )
    return table if status.pools else Text("no pools", style=_DIM)


def _lanes(status: admin_pb2.GetStatusResponse, width: int) -> RenderableType:
    # A coordinator that is younger than the window has counted for as long as it lives.
    window_s = min(one.ToNanoseconds() / 1e9 for one in (status.window, status.uptime)) or 1.0
    wide = width >= _WIDE
    rates = (">REQ/S", ">TOK/S", ">SHED") if wide else ()
    table = _table(
        "LANE", ">QUEUED", ">RUNNING", *rates, "", ">P50", ">P95", ">P99", ">TARGET", ">KEPT"
    )
    for lane in status.lanes:
        more = (
            (
                f"{lane.num_ended / window_s:.1f}",
                f"{lane.num_output_tokens / window_s:.0f}",
                str(sum(lane.sheds.values())),
            )
            if wide
            else ()
        )
        targets = lane.targets
        for name, values, target_ms, attained in (
            ("TTFT", lane.ttft, targets.ttft_ms, _attained(lane, "ttft_attained")),
            ("ITL", lane.itl, targets.itl_ms, _attained(lane, "itl_attained")),
        ):
            first = name == "TTFT"
            table.add_row(
                lane_name(lane.info.lane) if first else "",
                str(lane.info.num_queued) if first else "",
                str(lane.info.num_running) if first else "",
                *(more if first else ("",) * len(more)),
                Text(name, style=_DIM),
                *(
                    _time(value_us, values.num, target_ms)
                    for value_us in (values.p50_us, values.p95_us, values.p99_us)
                ),
                f"{target_ms} ms" if target_ms else "-",
                _kept(attained, targets.percentile),
            )
    return table if status.lanes else Text("no lanes", style=_DIM)


def _workers(status: admin_pb2.GetStatusResponse, room: int) -> RenderableType:
    if not status.workers:
        return Text(
            "no workers are attached: baton worker --role prefill|decode --coordinator HOST:PORT",
            style=_BAD,
            no_wrap=True,
            overflow="ellipsis",
        )
    table = _table("WORKER", "ROLE", "STATE", ">REQUESTS", ">WAITING", ">KV USED", ">STAGING")
    shown = status.workers[: room if len(status.workers) <= room else room - 1]
    for worker in shown:
        state = enum_name(cluster_pb2.WorkerState.DESCRIPTOR, worker.state)
        if worker.unresponsive:
            state = "silent"
        table.add_row(
            worker.worker_id if len(worker.worker_id) <= 20 else f"{worker.worker_id[:19]}…",
            role_name(worker.role),
            Text(state, style=_GOOD if state == "serving" else _BAD),
            str(worker.num_requests),
            str(worker.num_waiting),
            _share(worker.kv_tokens_used, worker.kv_tokens_total),
            _share(worker.staging_bytes_used, worker.staging_bytes_total),
        )
    left = len(status.workers) - len(shown)
    return Group(table, Text(f"and {left} more", style=_DIM)) if left else table


def _decisions(view: View, room: int, width: int) -> RenderableType:
    title = Text("LAST SCALE EVENTS", style=_DIM)
    if view.decisions is None:
        return Group(title, Text("nothing scales these pools", style=_DIM))
    if not view.decisions:
        return Group(title, Text("none yet", style=_DIM))
    now_s = view.status.at.ToNanoseconds() / 1e9
    lines = []
    for one in view.decisions[:room]:
        ago = _span(max(0.0, now_s - one.at.ToNanoseconds() / 1e9))
        role = role_name(one.role)
        size = f"{role} {one.from_workers} → {one.to_workers}"
        lines.append(
            _line([(f"{ago:>7} ago  ", _DIM), (size, _HEAD), (f"  {one.reason}", "")], width)
        )
    return Group(title, *lines)


def _line(parts: Sequence[tuple[str, str]], width: int) -> Text:
    text = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    text.truncate(width, overflow="ellipsis")
    return text


def _rows(num: int, room: int) -> int:
    """Lines of a list with its title."""
    return 1 + min(max(1, num), room) if num else 1


def _time(value_us: int, num: int, target_ms: int) -> Text:
    if not num:
        return Text("-", style=_DIM)
    late = bool(target_ms) and value_us > target_ms * 1000
    value_ms = value_us / 1e3
    if value_ms >= 10_000:
        told = f"{value_ms / 1e3:.1f} s"
    else:
        told = f"{value_ms:.0f} ms" if value_ms >= 100 else f"{value_ms:.1f} ms"
    return Text(told, style=_BAD if late else "")


def _attained(
    lane: admin_pb2.LaneStatus, field: Literal["ttft_attained", "itl_attained"]
) -> float | None:
    value: float = getattr(lane, field)
    return value if lane.HasField(field) else None


def _kept(attained: float | None, percentile: float) -> Text:
    if attained is None:
        return Text("-", style=_DIM)
    # 100 % is all of them.
    told = "100 %" if attained == 1 else f"{min(99.9, 100 * attained):.1f} %"
    return Text(told, style=_GOOD if attained >= percentile / 100 else _BAD)


def _share(used: int, total: int) -> str:
    return f"{100 * used / total:.0f} %" if total else "-"


def _window(view: View) -> str:
    return f"{view.status.window.ToNanoseconds() / 1e9:.0f}"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
