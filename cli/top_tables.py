"""The tables of `baton top`, fitted to the width of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.cli.columns import POOL_COLUMNS, fitting, pool_cells, share, state_name, ttft_target
from baton.client.doctor.findings import needs_first_worker, pool_groups
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import lane_name, role_name
from baton.v1 import admin_pb2

GOOD, BAD, DIM, HEAD = "green", "red", "bright_black", "bold"
_GAP = 2


def pools(status: admin_pb2.GetStatusResponse, width: int) -> RenderableType:
    if not status.pools:
        return Text("no pools", style=DIM)
    rows = list[Sequence[str | Text]]()
    for group in pool_groups(status):
        style = BAD if needs_first_worker(status, group) else ""
        for name, serving, *others in map(pool_cells, group):
            rows.append((name, Text(serving, style=style), *others))
    return _table(
        POOL_COLUMNS,
        rows,
        width,
        ("DRAINING", "RUNNING", "WANTED", "STARTING", "KV USED", "WAITING"),
    )


def lanes(status: admin_pb2.GetStatusResponse, width: int) -> RenderableType:
    if not status.lanes:
        return Text("no lanes", style=DIM)
    # A coordinator that is younger than the window has counted only since its start.
    window_s = min(to_seconds(one) for one in (status.window, status.uptime)) or 1.0
    rows = list[Sequence[str | Text]]()
    for lane in status.lanes:
        counts = (
            lane_name(lane.info.lane),
            str(lane.info.num_queued),
            str(lane.info.num_running),
            f"{lane.num_ended / window_s:.1f}",
            f"{lane.num_output_tokens / window_s:.0f}",
            str(sum(lane.sheds.values())),
        )
        targets = lane.targets
        # Every request has its own TTFT target.
        late = [one > 1 for one in (lane.ttft_ratio.p50, lane.ttft_ratio.p95, lane.ttft_ratio.p99)]
        itl_us, itls = targets.itl_ms * 1000, (lane.itl.p50_us, lane.itl.p95_us, lane.itl.p99_us)
        slow = [0 < itl_us < one for one in itls]
        itl_target = f"{targets.itl_ms} ms" if itl_us else "-"
        for name, values, target, is_bad, attained in (
            ("TTFT", lane.ttft, ttft_target(targets), late, _attained(lane, "ttft_attained")),
            ("ITL", lane.itl, itl_target, slow, _attained(lane, "itl_attained")),
        ):
            rows.append(
                (
                    *(counts if name == "TTFT" else ("",) * len(counts)),
                    Text(name, style=DIM),
                    *(
                        _time(value_us, values.num, bad=bad)
                        for value_us, bad in zip(
                            (values.p50_us, values.p95_us, values.p99_us), is_bad, strict=True
                        )
                    ),
                    target,
                    _attained_cell(attained, targets.percentile),
                )
            )
    return _table(
        (
            "LANE",
            ">QUEUED",
            ">RUNNING",
            ">REQ/S",
            ">TOK/S",
            ">SHED",
            "",
            ">P50",
            ">P95",
            ">P99",
            ">TARGET",
            ">ATTAINED",
        ),
        rows,
        width,
        ("REQ/S", "TOK/S", "SHED", "P50", "RUNNING", "P99", "TARGET", "QUEUED"),
    )


def workers(status: admin_pb2.GetStatusResponse, room: int, width: int) -> RenderableType:
    if not status.workers:
        return Text(
            "no workers are attached: baton worker --role prefill|decode --coordinator HOST:PORT",
            style=BAD,
            no_wrap=True,
            overflow="ellipsis",
        )
    rows = list[Sequence[str | Text]]()
    for worker in status.workers[: room if len(status.workers) <= room else room - 1]:
        state = state_name(worker)
        rows.append(
            (
                worker.worker_id if len(worker.worker_id) <= 20 else f"{worker.worker_id[:19]}…",
                role_name(worker.role),
                Text(state, style=GOOD if state == "serving" else BAD),
                str(worker.num_requests),
                str(worker.num_waiting),
                share(worker.kv_tokens_used, worker.kv_tokens_total),
                share(worker.staging_bytes_used, worker.staging_bytes_total),
            )
        )
    table = _table(
        ("WORKER", "ROLE", "STATE", ">REQUESTS", ">WAITING", ">KV USED", ">STAGING"),
        rows,
        width,
        ("STAGING", "WAITING", "REQUESTS", "KV USED", "ROLE"),
    )
    left = len(status.workers) - len(rows)
    return Group(table, Text(f"and {left} more", style=DIM)) if left else table


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    drop_first: Sequence[str],
) -> Table:
    """A table with as many columns as fit.

    Args:
        columns: Column titles; a title that begins with ">" is aligned right.
        rows: Rows with one cell per column.
        width: Width of the terminal, or of the table's part of it, in characters.
        drop_first: Columns to leave out first on a narrow terminal, in this order.
    """
    names = [column.removeprefix(">") for column in columns]
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [
        max(len(name), *(row[index].cell_len for row in cells)) for index, name in enumerate(names)
    ]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style=DIM)
    kept = fitting(names, widths, drop_first, width, _GAP)
    for index in kept:
        justify: Literal["left", "right"] = "right" if columns[index].startswith(">") else "left"
        table.add_column(names[index], justify=justify, no_wrap=True, overflow="ellipsis")
    for row in cells:
        table.add_row(*(row[index] for index in kept))
    return table


def _time(value_us: int, num: int, *, bad: bool) -> Text:
    if not num:
        return Text("-", style=DIM)
    value_ms = value_us / 1e3
    if value_ms >= 10_000:
        text = f"{value_ms / 1e3:.1f} s"
    else:
        text = f"{value_ms:.0f} ms" if value_ms >= 100 else f"{value_ms:.1f} ms"
    return Text(text, style=BAD if bad else "")


def _attained(
    lane: admin_pb2.LaneStatus, field: Literal["ttft_attained", "itl_attained"]
) -> float | None:
    value: float = getattr(lane, field)
    return value if lane.HasField(field) else None


def _attained_cell(attained: float | None, percentile: float) -> Text:
    if attained is None:
        return Text("-", style=DIM)
    # 100 % is shown only if every request met the target.
    text = "100 %" if attained == 1 else f"{min(99.9, 100 * attained):.1f} %"
    return Text(text, style=GOOD if attained >= percentile / 100 else BAD)
