"""Results, goals and tables of bench/disaggregation.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.bench.streams import Timed
from baton.load import stats
from baton.load.stats import Goal

PLAIN, PLAIN_PAIR = "plain vLLM", "two plain vLLM"
BATON, ELASTIC, NIXL = "Baton", "Baton, elastic", "vLLM NixlConnector"
# Number of requests to a system that has just started, one at a time, without warm-up.
FRESH_REQUESTS = 12

# Goals for Baton: exposed handoff / prefill; gap from first to second token / steady ITL, by
# concurrency; first handoff of a new pair / its steady handoff; TTFT of an elastic cell / plain
# vLLM's with one request in flight.
MAX_EXPOSED_SHARE, EXPOSED_FROM_TOKENS = 0.02, 512
MAX_GAP_RATIO = {1: 1.3, 4: 2.0}
MAX_FIRST_RATIO = 2.0
MAX_TTFT_RATIO = 1.05

COLUMNS = {
    "ttft_p50_ms": "TTFT p50",
    "ttft_p95_ms": "TTFT p95",
    "ttft_p99_ms": "TTFT p99",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "second_gap_p50_ms": "gap 1-2 p50",
    "second_gap_p95_ms": "gap 1-2 p95",
    "second_gap_ratio": "gap / own ITL",
    "e2e_p50_ms": "E2E p50",
    "exposed_p50_ms": "handoff p50",
    "exposed_p95_ms": "handoff p95",
    "exposed_share": "handoff / prefill",
}
NOT_OVER_PLAIN = ("second_gap_ratio", "exposed_p50_ms", "exposed_p95_ms", "exposed_share")
NOTES = """\
Times are in ms, as the client sees them. "gap 1-2" is the time from the first to the second token;
"gap / own ITL" divides its p50 by the median of the later gaps of the same system. "handoff" is the
exposed part of the handoff; Baton's runs from the last computed layer to the verified commit.
With several requests in flight a new prompt follows each answer. TTFT then includes the wait behind
other prompts; in Baton this is the prefill worker's queue. Baton's gap 1-2 begins after that queue,
with the prefill worker's token: it is the exposed handoff, the rest of the decode worker's running
step, the load and one step. Baton's prefill time includes chunks of other prompts that are computed
in between. In plain vLLM, gaps and ITL include the prefill of other requests.
"two plain vLLM" has as many cores and engines as Baton; each prompt goes to the server with the
fewest requests. With one request in flight, two servers answer as one does.
NIXL's first token comes from the decode server, so the handoff is part of TTFT, not of gap 1-2. Its
handoff column runs from the prefill server's answer to that token, including one decode step; its
prefill time includes the queue."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One prompt length at one concurrency.

    Attributes:
        timed: Counted answers by system, in the order of the prompts. All systems get the same
            prompts.
    """

    prompt_tokens: int
    concurrency: int
    timed: dict[str, list[Timed]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} tokens in, {self.concurrency} in flight"

    def num_different(self, system: str) -> int:
        """Returns how many outputs of a system differ from plain vLLM's."""
        pairs = zip(self.timed[PLAIN], self.timed[system], strict=False)
        return sum(plain.token_ids != one.token_ids for plain, one in pairs)


@dataclass(frozen=True, slots=True)
class Fresh:
    """The first requests of a system that has just started.

    Attributes:
        system: Name of the system.
        first: Answer to the first request.
        later: Answers to the requests after the first.
    """

    system: str
    first: Timed
    later: list[Timed]

    def first_and_steady_ms(
        self, measure: Callable[[Timed], float | None]
    ) -> tuple[float, float] | None:
        """Returns the first request's value and the median of the later ones, in ms.

        Returns None if the system does not have this measure.
        """
        first = measure(self.first)
        later = [value for one in self.later if (value := measure(one)) is not None]
        return None if first is None or not later else (first * 1e3, stats.median(later) * 1e3)

    def ratio(self, measure: Callable[[Timed], float | None]) -> float:
        """Returns the first request's value / the median of the later ones; nan if missing."""
        found = self.first_and_steady_ms(measure)
        return stats.ratio(*found) if found is not None else float("nan")


@dataclass(slots=True)
class Results:
    """All measurements of the benchmark.

    Attributes:
        output_tokens: Output tokens of each request.
        fresh_tokens: Prompt tokens of each request to a system that has just started.
        cells: Answers by prompt length and concurrency.
        fresh: Answers of systems that had just started.
        resident_mb: Memory by process and by part of the process.
        handoff_counters: Handoff counters of the coordinator that served the cells.
        num_sent: Number of requests sent to this coordinator.
    """

    output_tokens: int
    fresh_tokens: int
    cells: list[Cell]
    fresh: list[Fresh] = field(default_factory=list)
    resident_mb: dict[str, dict[str, float]] = field(default_factory=dict)
    handoff_counters: dict[str, float] = field(default_factory=dict)
    num_sent: int = 0


def summary(timed: list[Timed]) -> dict[str, float]:
    """Returns the values of COLUMNS for one system in one cell; plain vLLM has no handoff."""
    ttfts, seconds = [one.ttft_s for one in timed], [one.second_gap_s for one in timed]
    gaps = [gap for one in timed for gap in one.steady_gaps_s]
    exposed = [
        (one.exposed_s, one.prefill_s)
        for one in timed
        if one.exposed_s is not None and one.prefill_s
    ]
    made = {
        **{f"ttft_p{at}_ms": stats.percentile(ttfts, at) * 1e3 for at in (50, 95, 99)},
        **{f"itl_p{at}_ms": stats.percentile(gaps, at) * 1e3 for at in (50, 99)},
        **{f"second_gap_p{at}_ms": stats.percentile(seconds, at) * 1e3 for at in (50, 95)},
        "second_gap_ratio": stats.ratio(stats.median(seconds), stats.median(gaps)),
        "e2e_p50_ms": stats.median([one.e2e_s for one in timed]) * 1e3,
    }
    if exposed:
        for at in (50, 95):
            made[f"exposed_p{at}_ms"] = stats.percentile([one for one, _ in exposed], at) * 1e3
        made["exposed_share"] = stats.median([one / prefill for one, prefill in exposed])
    return made


def goals(results: Results) -> Iterator[Goal]:
    """Yields the goals for Baton with their measured values."""
    for cell in results.cells:
        if cell.concurrency == 1 and ELASTIC in cell.timed:
            plain, elastic = summary(cell.timed[PLAIN]), summary(cell.timed[ELASTIC])
            ratio = stats.ratio(elastic["ttft_p50_ms"], plain["ttft_p50_ms"])
            yield Goal(f"{cell.name}: TTFT, elastic / plain vLLM", ratio, MAX_TTFT_RATIO, " x")
        if BATON not in cell.timed:
            continue
        own = summary(cell.timed[BATON])
        if (limit := MAX_GAP_RATIO.get(cell.concurrency)) is not None:
            what = f"{cell.name}: gap first to second token / own ITL"
            yield Goal(what, own["second_gap_ratio"], limit, " x")
        if cell.prompt_tokens >= EXPOSED_FROM_TOKENS:
            share = own.get("exposed_share", float("nan"))
            what = f"{cell.name}: exposed handoff / prefill"
            yield Goal(what, share * 100, MAX_EXPOSED_SHARE * 100, " %")
        if cell.concurrency == 1:
            what = f"{cell.name}: outputs that differ from plain vLLM's"
            yield Goal(what, cell.num_different(BATON), 0)
    pairs = [one for one in results.fresh if one.system == BATON]
    if not pairs:
        return
    for name, measure in (("exposed handoff", exposed), ("gap first to second token", second_gap)):
        what = f"a fresh pair's first {name} / its steady one, worst of {len(pairs)} pairs"
        yield Goal(what, stats.worst([one.ratio(measure) for one in pairs]), MAX_FIRST_RATIO, " x")


def ttft(timed: Timed) -> float:
    return timed.ttft_s


def exposed(timed: Timed) -> float | None:
    return timed.exposed_s


def second_gap(timed: Timed) -> float:
    return timed.second_gap_s


def stage(name: str) -> Callable[[Timed], float | None]:
    return lambda timed: timed.stage_s(name) if timed.budget is not None else None


# Stages of a first request. The warm-up of an engine appears in the prefill and in the gap outside
# the handoff, as in plain vLLM's first request.
FRESH_ROWS: dict[str, Callable[[Timed], float | None]] = {
    "TTFT": ttft,
    "  prefill queue": stage("prefill_queue"),
    "  prefill": stage("prefill"),
    "gap first to second token": second_gap,
    "  exposed handoff": exposed,
    "  decode queue": stage("decode_queue"),
    "network, both workers": stage("network"),
}


def show(results: Results) -> None:
    """Prints the tables."""
    for cell in results.cells:
        show_cell(cell, results.output_tokens)
    print(NOTES)
    if results.fresh:
        show_fresh(results)
    rows = [
        [process, kind, f"{mb:.0f}"]
        for process, kinds in results.resident_mb.items()
        for kind, mb in kinds.items()
    ]
    if rows:
        stats.print_table("Resident memory without staging, MB", ["process", "part", "MB"], rows)
    rows = [["requests sent", f"{results.num_sent}"]]
    rows += [[name, f"{value:,.0f}"] for name, value in results.handoff_counters.items()]
    stats.print_table("Handoffs of the last pair", ["counter of the coordinator", "seen"], rows)
    stats.print_goals(list(goals(results)))


def show_cell(cell: Cell, output_tokens: int) -> None:
    plain, rows = summary(cell.timed[PLAIN]), list[list[str]]()
    for name, timed in cell.timed.items():
        one = summary(timed)
        differ = "" if name == PLAIN else f"{cell.num_different(name)} of {len(timed)}"
        rows.append([name, *(shown(column, one.get(column)) for column in COLUMNS), differ])
        if name != PLAIN:
            over = [
                "" if column in NOT_OVER_PLAIN else f"{one[column] / plain[column]:.2f}"
                for column in COLUMNS
            ]
            rows.append(["  x plain", *over, ""])
    counts = ", ".join(
        f"{name} {len(timed)} requests and {sum(len(one.steady_gaps_s) for one in timed)} gaps"
        for name, timed in cell.timed.items()
    )
    title = f"{cell.name}, {output_tokens} out ({counts})"
    stats.print_table(title, ["system", *COLUMNS.values(), "outputs differ"], rows)


def shown(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column == "exposed_share":
        return f"{value * 100:.2f} %"
    return f"{value:.2f}" if column == "second_gap_ratio" else f"{value:.1f}"


def show_fresh(results: Results) -> None:
    rows = []
    for name, measure in FRESH_ROWS.items():
        found = [one.first_and_steady_ms(measure) for one in results.fresh]
        seen = ["-" if one is None else f"{one[0]:.1f} / {one[1]:.1f}" for one in found]
        rows.append([name, *seen])
    title = (
        f"First request after the start / median of the next {FRESH_REQUESTS - 1}, ms "
        f"({results.fresh_tokens} tokens in, one at a time, nothing warmed up)"
    )
    stats.print_table(title, ["", *(one.system for one in results.fresh)], rows)


def stage_medians(timed: list[Timed]) -> dict[str, float]:
    """Returns the medians of the stages of Baton's latency budgets, in ms."""
    names = {stage.stage for one in timed if one.budget for stage in one.budget.stages}
    return {name: stats.median([one.stage_s(name) * 1e3 for one in timed]) for name in names}


def as_json(results: Results, model: str) -> dict[str, Any]:
    """Returns all measurements as JSON."""
    return {
        "model": model,
        "output_tokens": results.output_tokens,
        "cells": [
            {
                "prompt_tokens": cell.prompt_tokens,
                "concurrency": cell.concurrency,
                "requests": {name: len(timed) for name, timed in cell.timed.items()},
                "systems": {name: summary(timed) for name, timed in cell.timed.items()},
                "stages_p50_ms": stage_medians(cell.timed.get(BATON, [])),
                "outputs that differ": {name: cell.num_different(name) for name in cell.timed},
            }
            for cell in results.cells
        ],
        "fresh": [
            {
                "system": one.system,
                "prompt_tokens": results.fresh_tokens,
                "first and steady, ms": {
                    name.strip(): one.first_and_steady_ms(measure)
                    for name, measure in FRESH_ROWS.items()
                },
            }
            for one in results.fresh
        ],
        "resident_mb": results.resident_mb,
        "requests sent": results.num_sent,
        "handoff_counters": results.handoff_counters,
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(results)],
    }
