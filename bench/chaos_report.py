"""The report of bench/chaos.py: pauses of streams by cause, faults, leaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from baton.client import Tokens
from baton.load import stats
from baton.load.stats import Goal

if TYPE_CHECKING:
    from baton.bench.chaos import Chaos

# Gaps of at least this many seconds count as pauses.
PAUSE_S = 0.5
LONGEST_PAUSE_S = 3.0
# A disturbance may cause pauses for this long after its end: until the coordinator notices a kill
# and other workers continue the streams.
AFTERMATH_S = 4.0
PERCENTS = (50.0, 90.0, 99.0)
_NUM_WORST = 40


class Kind(StrEnum):
    """Kinds of disturbances."""

    WORKER_KILLED = "worker killed"
    WORKER_STOPPED = "worker stopped"
    COORDINATOR_KILLED = "coordinator killed"


@dataclass(slots=True)
class Disturbance:
    """A kill or stop of one process.

    Attributes:
        pool: Pool of the worker; empty for the coordinator.
        at: Time on the monotonic clock, as all times in this module.
        lasted_s: Seconds until a stopped worker was continued, or a new coordinator answered.
    """

    kind: Kind
    pool: str
    at: float
    lasted_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two events of a stream; the first gap begins at the submission."""

    begin: float
    end: float

    @property
    def length_s(self) -> float:
        return self.end - self.begin


@dataclass(slots=True)
class Stream:
    """One request and its answer.

    Attributes:
        times: Times of the events with tokens.
        right: Whether the tokens and the text are those of an undisturbed run.
    """

    prompt: list[int]
    num_tokens: int
    begun_at: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""
    right: bool = False
    num_resumes: int = 0

    def add(self, event: Tokens, at: float) -> None:
        self.token_ids += event.token_ids
        self.text += event.text
        self.times.append(at)

    def gaps(self) -> list[Gap]:
        begins = [self.begun_at, *self.times]
        return [Gap(begin, end) for begin, end in zip(begins, self.times, strict=False)]


def cause_of(gap: Gap, disturbances: Sequence[Disturbance]) -> Disturbance | None:
    """Returns the possible cause that began nearest to the start of the gap, or None."""
    possible = [
        one
        for one in disturbances
        if one.at <= gap.end and gap.begin <= one.at + one.lasted_s + AFTERMATH_S
    ]
    return min(possible, key=lambda one: abs(one.at - gap.begin), default=None)


def pauses_by_kind(
    streams: Sequence[Stream], disturbances: Sequence[Disturbance]
) -> dict[str, list[float]]:
    """Returns the longest pause per stream in seconds, by cause; "" means no known cause."""
    found: dict[str, list[float]] = {kind: [] for kind in ("", *Kind)}
    for stream in streams:
        longest: dict[str, float] = {}
        for gap in stream.gaps():
            if gap.length_s >= PAUSE_S:
                cause = cause_of(gap, disturbances)
                kind = cause.kind if cause is not None else ""
                longest[kind] = max(longest.get(kind, 0.0), gap.length_s)
        for kind, length_s in longest.items():
            found[kind].append(length_s)
    return found


def figures(chaos: Chaos) -> dict[str, Any]:
    """Returns everything that is reported, for JSON."""
    streams = chaos.streams
    wrong = [one for one in streams if not one.right]
    by_kind = pauses_by_kind(streams, chaos.disturbances)
    longest = [max(gap.length_s for gap in one.gaps()) for one in streams if one.times]
    of_workers = by_kind[Kind.WORKER_KILLED] + by_kind[Kind.WORKER_STOPPED]
    faults = [
        Goal("streams that failed", sum(bool(one.error) for one in streams), 0),
        Goal("streams with other tokens", sum(not one.error for one in wrong), 0),
        Goal("workers that ended by themselves", len(chaos.odd_ends), 0),
        Goal("things left behind", len(chaos.left), 0),
    ]
    pauses = [Goal("longest pause, worker lost", max(of_workers, default=0), LONGEST_PAUSE_S, " s")]
    if of_coordinator := by_kind[Kind.COORDINATOR_KILLED]:
        what = "longest pause, coordinator lost"
        pauses.append(Goal(what, max(of_coordinator), LONGEST_PAUSE_S, " s"))
    return {
        "correct": all(one.reached for one in faults),
        "num_streams": len(streams),
        "num_tokens": sum(len(one.token_ids) for one in streams),
        "num_resumes": sum(one.num_resumes for one in streams),
        "busy": chaos.busy,
        "own_busy": chaos.own_busy,
        "counters": dict(chaos.counters),
        "replaced": dict(chaos.num_replaced),
        "disturbances": [asdict(one) for one in chaos.disturbances],
        "longest_gap_s": _percentiles(longest),
        "worst": _worst(streams),
        "pauses": {
            kind: {
                "num_disturbances": sum(one.kind == kind for one in chaos.disturbances),
                "num_streams": len(lengths),
                "num_over_limit": sum(length > LONGEST_PAUSE_S for length in lengths),
                **_percentiles(lengths),
            }
            for kind, lengths in by_kind.items()
        },
        "errors": [one.error for one in wrong if one.error],
        "odd_ends": chaos.odd_ends,
        "left": chaos.left,
        "reaches": [asdict(one) | {"reached": one.reached} for one in faults + pauses],
    }


def _worst(streams: Sequence[Stream]) -> list[dict[str, float]]:
    """Returns the longest gaps of all streams, with the number of earlier events."""
    every = [(gap, index) for one in streams for index, gap in enumerate(one.gaps())]
    every.sort(key=lambda found: found[0].length_s, reverse=True)
    return [
        {"begin": gap.begin, "length_s": gap.length_s, "num_events": index}
        for gap, index in every[:_NUM_WORST]
    ]


def show(name: str, results: dict[str, Any]) -> None:
    rows = [
        [
            kind or "no disturbance",
            str(each["num_disturbances"] or ""),
            str(each["num_streams"]),
            *_shown(each),
            str(each["num_over_limit"]),
        ]
        for kind, each in results["pauses"].items()
        if each["num_disturbances"] or each["num_streams"]
    ]
    gaps = _shown(results["longest_gap_s"])
    rows.append(["longest gap in each stream", "", str(results["num_streams"]), *gaps, ""])
    counters = ", ".join(f"{what} {n}" for what, n in results["counters"].items())
    title = (
        f"Disturbed: {name}; {results['num_streams']} streams, {results['num_tokens']} tokens, "
        f"{results['num_resumes']} resumed by the client, cores {results['busy']:.0%} busy, "
        f"{results['own_busy']:.0%} with this\n"
        f"{counters}, replaced {results['replaced']}; pauses are gaps of {PAUSE_S:g} s and more"
    )
    over = f"over {LONGEST_PAUSE_S:g} s"
    header = ["pause because of", "times", "streams", "p50 s", "p90 s", "p99 s", "max s", over]
    stats.print_table(title, header, rows)
    for line in [*results["errors"], *results["odd_ends"], *results["left"]][:20]:
        print(line)
    stats.print_goals(
        [Goal(one["what"], one["seen"], one["limit"], one["unit"]) for one in results["reaches"]]
    )


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {
        f"p{percent:g}": stats.percentile(values, percent) if values else None
        for percent in PERCENTS
    }
    return found | {"max": max(values, default=None)}


def _shown(percentiles: dict[str, Any]) -> list[str]:
    names = [*(f"p{percent:g}" for percent in PERCENTS), "max"]
    return ["" if percentiles[name] is None else f"{percentiles[name]:.2f}" for name in names]
