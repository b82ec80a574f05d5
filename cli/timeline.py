"""Prints a request's latency budget as a waterfall."""

from __future__ import annotations

from baton.cli.output import print_table, print_text, table_width, terminal_width
from baton.client.events import LatencyBudget, StageTime

# Shorter bars show too little.
_MIN_BAR_CHARS, _MAX_BAR_CHARS = 8, 32
# Stages in order of their start. True: print the stage even if it took no time.
_STAGES = {
    "tokenize": False,
    "queue": True,
    "prefill_queue": False,
    "prefill": True,
    "handoff": True,
    "decode_queue": False,
    "decode": True,
}


def print_timeline(budget: LatencyBudget) -> None:
    """Prints one line per stage: its start, its duration and its share of the total time.

    On a narrow terminal the bars are shorter or left out, so that a line fits.
    """
    total_ms = budget.total_ms
    stages = _with_empty_stages(budget.stages)
    columns = ["STAGE", ">START", ">TIME", ">SHARE", "WORKER"]
    rows = [
        [
            stage.stage.replace("_", " "),
            f"{stage.start_ms:.1f} ms",
            f"{stage.duration_ms:.1f} ms",
            f"{100 * stage.duration_ms / total_ms:.0f} %" if total_ms else "-",
            stage.worker_id or ("-" if stage.stage == "network" else "coordinator"),
        ]
        for stage in stages
    ]
    if num_chars := _bar_chars(columns, rows):
        columns.insert(-1, "")
        for stage, row in zip(stages, rows, strict=True):
            row.insert(-1, bar(stage.start_ms, stage.duration_ms, total_ms, num_chars))
    hint = "a wider terminal shows all"
    print_table(columns, rows, "no latency budget", ("SHARE", "START"), hint, wraps_last=False)
    print_text(
        f"first token {budget.ttft_ms:.1f} ms, total {total_ms:.1f} ms, "
        f"between tokens p50 {budget.itl_p50_ms:.1f} ms, max {budget.itl_max_ms:.1f} ms"
    )


def _bar_chars(columns: list[str], rows: list[list[str]]) -> int:
    """Length of the bars beside these columns, at most _MAX_BAR_CHARS; 0: no room for bars."""
    width = terminal_width()
    if width is None:
        return _MAX_BAR_CHARS
    widths = [
        max(map(len, cells))
        for cells in zip([column.removeprefix(">") for column in columns], *rows, strict=True)
    ]
    room = width - table_width([*widths, 0])
    return min(room, _MAX_BAR_CHARS) if room >= _MIN_BAR_CHARS else 0


def bar(start_ms: float, duration_ms: float, total_ms: float, num_chars: int) -> str:
    """Bar of fixed width that shows a stage's place in the total; a thin line for no time."""
    if total_ms <= 0:
        return ""
    first = min(round(num_chars * start_ms / total_ms), num_chars - 1)
    length = min(round(num_chars * duration_ms / total_ms), num_chars - first)
    return (" " * first + ("█" * length or "▏")).ljust(num_chars)


def _with_empty_stages(stages: tuple[StageTime, ...]) -> list[StageTime]:
    """Adds the missing stages that are always printed, with a duration of 0."""
    order, shown = list(_STAGES), list(stages)
    for name in order:
        if not _STAGES[name] or any(stage.stage == name for stage in shown):
            continue
        earlier, later = order[: order.index(name)], order[order.index(name) + 1 :]
        # The decode queue of a worker that computed the prompt too comes before the prefill.
        first = max((i + 1 for i, stage in enumerate(shown) if stage.stage in earlier), default=0)
        following = (i for i in range(first, len(shown)) if shown[i].stage in later)
        at = next(following, len(shown))
        end_ms = shown[at - 1].start_ms + shown[at - 1].duration_ms if at else 0.0
        shown.insert(at, StageTime(name, end_ms, 0.0, "-"))
    return shown
