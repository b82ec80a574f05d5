"""Cases, goals and tables of coordinator_cost.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from baton.bench.cost_meter import Figures
from baton.bench.scheduling_cost import Scheduling
from baton.load import stats
from baton.load.stats import Goal

PATHS = SESSION, SINGLE = "one session", "single streams"
PACED, FLAT, ONE_TOKEN, DIRECT = "paced", "flat out", "one token", "direct"
# The relay cases run over sessions only.
RELAY = "relay"
RELAY_PACED, RELAY_FLAT, RELAY_ONE_TOKEN = (f"{RELAY} {kind}" for kind in (PACED, FLAT, ONE_TOKEN))
KINDS = (PACED, FLAT, ONE_TOKEN, DIRECT, RELAY_PACED, RELAY_FLAT, RELAY_ONE_TOKEN)
# Goals for sessions, at a concurrency of GOAL_REQUESTS.
MAX_CPU_MS_PER_1000_TOKENS, MAX_US_PER_TOKEN, MAX_CPU_MS_PER_REQUEST = 8.0, 1e6 / 150_000, 0.5
MAX_ADDED_TTFT_MS, MAX_RESIDENT_MB, GOAL_REQUESTS = 1.5, 150.0, 256
# Numbers of workers and of waiting requests for which one decision is measured. Goals: a limit for
# the largest combination, and a duration that grows at most with the logarithm of the queue length.
NUM_WORKERS, NUM_QUEUED, MAX_DECISION_US = (100, 1000), (1000, 10_000, 100_000), 200.0

COLUMNS = {
    "tokens_per_s": ("tokens/s", ",.0f"),
    "requests_per_s": ("requests/s", ",.0f"),
    "cpu_ms_per_1000_tokens": ("CPU ms / 1,000 tokens", ".2f"),
    "cpu_ms_per_request": ("CPU ms / request", ".3f"),
    "cores": ("cores", ".2f"),
    "ttft_p50_ms": ("TTFT p50", ".2f"),
    "ttft_p99_ms": ("TTFT p99", ".2f"),
    "itl_p50_ms": ("ITL p50", ".2f"),
    "itl_p99_ms": ("ITL p99", ".2f"),
    "resident_mb": ("MB", ".0f"),
    "others": ("others", ".2f"),
}
NOTES = """\
CPU, cores and MB are those of the coordinator's process with all threads; "others" are cores used
by processes outside this benchmark. TTFT and ITL are in ms, as the client sees them; the
coordinator adds the difference to "direct". Paced: a new request follows when one has ended. Flat
out: waves of requests; decoding of a wave starts when all its requests have arrived, so TTFT and
ITL mean nothing there. A bare relay only forwards the same number of messages of about the same
length, so its cost is the cost of gRPC."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load: kind of stream, kind of run, and number of requests at a time."""

    path: str
    kind: str
    num_requests: int

    @property
    def is_relayed(self) -> bool:
        """Whether a bare relay replaces the coordinator."""
        return self.kind.startswith(RELAY)

    @property
    def is_flat_out(self) -> bool:
        return self.kind in (FLAT, RELAY_FLAT)


@dataclass(frozen=True, slots=True)
class Results:
    """All measurements of the benchmark."""

    figures: dict[Case, Figures]
    scheduling: list[Scheduling]


def goals(results: Results) -> Iterator[Goal]:
    at = f"{SESSION}, {GOAL_REQUESTS} at once: "
    paced, one_token, direct = (
        results.figures.get(Case(SESSION, kind, GOAL_REQUESTS))
        for kind in (PACED, ONE_TOKEN, DIRECT)
    )
    if paced is not None:
        seen = paced.cpu_ms_per_1000_tokens
        yield Goal(at + "CPU per 1,000 tokens, paced", seen, MAX_CPU_MS_PER_1000_TOKENS, " ms")
        yield Goal(at + "resident", paced.resident_mb, MAX_RESIDENT_MB, " MB")
    if paced is not None and direct is not None:
        seen = paced.ttft_p50_ms - direct.ttft_p50_ms
        yield Goal(at + "TTFT p50 over direct", seen, MAX_ADDED_TTFT_MS, " ms")
    if one_token is not None:
        seen = one_token.cpu_ms_per_request
        yield Goal(at + "CPU per one-token request", seen, MAX_CPU_MS_PER_REQUEST, " ms")
    for case, figures in results.figures.items():
        if (case.path, case.kind) == (SESSION, FLAT):
            what = f"{SESSION}, {case.num_requests} at once, flat out: time per token"
            yield Goal(what, 1e6 / figures.tokens_per_s, MAX_US_PER_TOKEN, " us")
    if results.scheduling:
        shortest, longest = (
            next(
                one
                for one in results.scheduling
                if (one.num_workers, one.num_queued) == (max(NUM_WORKERS), num_queued)
            )
            for num_queued in (min(NUM_QUEUED), max(NUM_QUEUED))
        )
        yield Goal(f"one decision, {longest.name}", longest.decision_us, MAX_DECISION_US, " us")
        what = f"one decision, {longest.name} / {shortest.name}"
        growth = math.log(longest.num_queued) / math.log(shortest.num_queued)
        yield Goal(what, longest.decision_us / shortest.decision_us, growth, " x")


def beside_relay(figures: Mapping[Case, Figures]) -> Iterator[list[str]]:
    """Yields table rows that compare sessions through the coordinator and through a bare relay."""

    def found(kind: str, num_requests: int, name: str) -> float:
        one = figures.get(Case(SESSION, kind, num_requests))
        return getattr(one, name) if one is not None else math.nan

    for num_requests in sorted({case.num_requests for case in figures if case.is_relayed}):
        direct_ms = found(DIRECT, num_requests, "ttft_p50_ms")
        for what, kind, relayed, name, base in (
            ("CPU ms / 1,000 tokens, paced", PACED, RELAY_PACED, "cpu_ms_per_1000_tokens", 0.0),
            ("TTFT p50 over direct, ms", PACED, RELAY_PACED, "ttft_p50_ms", direct_ms),
            ("CPU ms / 1,000 tokens, flat out", FLAT, RELAY_FLAT, "cpu_ms_per_1000_tokens", 0.0),
            ("CPU ms / one-token request", ONE_TOKEN, RELAY_ONE_TOKEN, "cpu_ms_per_request", 0.0),
        ):
            ours, theirs = (found(one, num_requests, name) - base for one in (kind, relayed))
            if not math.isnan(ours + theirs):
                ratio = f"{stats.ratio(ours, theirs):.2f} x"
                yield [f"{num_requests}", what, f"{ours:.3g}", f"{theirs:.3g}", ratio]


def show(results: Results) -> None:
    header = ["at once", "", *(name for name, _ in COLUMNS.values())]
    for path in PATHS:
        rows = [
            [
                f"{case.num_requests}",
                case.kind,
                *(format(getattr(figures, name), how) for name, (_, how) in COLUMNS.items()),
            ]
            for case, figures in sorted(
                results.figures.items(), key=lambda item: item[0].num_requests
            )
            if case.path == path
        ]
        if rows:
            stats.print_table(f"Over {path}", header, rows)
    print(NOTES)
    rows = list(beside_relay(results.figures))
    if rows:
        header = ["at once", "", "coordinator", "bare relay", "ratio"]
        stats.print_table("Share of gRPC itself", header, rows)
    rows = [
        [one.name, *(f"{us:.0f}" for us in (one.decision_us, one.p50_us, one.p99_us, one.end_us))]
        for one in results.scheduling
    ]
    header = ["", "decision", "event p50", "event p99", "event p50, empty queue"]
    if rows:
        stats.print_table("One decision, us", header, rows)
    stats.print_goals(list(goals(results)))


def as_json(results: Results) -> dict[str, Any]:
    return {
        "cases": [asdict(case) | asdict(figures) for case, figures in results.figures.items()],
        "scheduling": [
            asdict(one) | {"decision_us": one.decision_us} for one in results.scheduling
        ],
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(results)],
    }
