"""A request's latency budget as a waterfall."""

from __future__ import annotations

from baton.cli.output import print_table
from baton.client.events import LatencyBudget, StageTime

_BAR_CHARS = 32
# In order of start. The marked ones have a line even when they took no time at all.
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
    """One line per stage: where it lay, how long it took, its share of the whole."""
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
    """A stage's place in the whole, always the same width; what took no time is a thin line."""
    if total_ms <= 0:
        return ""
    first = min(round(_BAR_CHARS * start_ms / total_ms), _BAR_CHARS - 1)
    length = min(round(_BAR_CHARS * duration_ms / total_ms), _BAR_CHARS - first)
    return (" " * first + ("█" * length or "▏")).ljust(_BAR_CHARS)


def _with_empty_stages(stages: tuple[StageTime, ...]) -> list[StageTime]:
    """The stages, and those that every reader looks for where they would have been."""
    order, shown = list(_STAGES), list(stages)
    for name in order:
        if not _STAGES[name] or any(stage.stage == name for stage in shown):
            continue
        later = order[order.index(name) + 1 :]
        at = next((i for i, stage in enumerate(shown) if stage.stage in later), len(shown))
        end_ms = shown[at - 1].start_ms + shown[at - 1].duration_ms if at else 0.0
        shown.insert(at, StageTime(name, end_ms, 0.0, "-"))
    return shown
