"""Prints a request's latency budget as a waterfall."""

from __future__ import annotations

from baton.cli.output import print_table
from baton.client.events import LatencyBudget, StageTime

_BAR_CHARS = 32
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
    """Prints one line per stage: its start, its duration and its share of the total time."""
    total_ms = budget.total_ms
    print_table(
        ("STAGE", ">START", ">TIME", ">SHARE", "", "WORKER"),
        [
            (
                stage.stage.replace("_", " "),
                f"{stage.start_ms:.1f} ms",
                f"{stage.duration_ms:.1f} ms",
                f"{100 * stage.duration_ms / total_ms:.0f} %" if total_ms else "-",
                bar(stage.start_ms, stage.duration_ms, total_ms),
                stage.worker_id or ("-" if stage.stage == "network" else "coordinator"),
            )
            for stage in _with_empty_stages(budget.stages)
        ],
        "no latency budget",
    )
    print(
        f"first token {budget.ttft_ms:.1f} ms, total {total_ms:.1f} ms, "
        f"between tokens p50 {budget.itl_p50_ms:.1f} ms, max {budget.itl_max_ms:.1f} ms"
    )


def bar(start_ms: float, duration_ms: float, total_ms: float) -> str:
    """Bar of fixed width that shows a stage's place in the total; a thin line for no time."""
    if total_ms <= 0:
        return ""
    first = min(round(_BAR_CHARS * start_ms / total_ms), _BAR_CHARS - 1)
    length = min(round(_BAR_CHARS * duration_ms / total_ms), _BAR_CHARS - first)
    return (" " * first + ("█" * length or "▏")).ljust(_BAR_CHARS)


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
