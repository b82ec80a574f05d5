"""Why disaggregate: one prefill and one decode worker against two plain vLLM servers.

`make bench`, or `python -m baton.bench.why --help`. Both systems have the same two cores and get
the same requests at the same times, one after the other, in an order that changes with each pair.
The plain servers are asked in turn (round robin); Baton has a coordinator with lanes, admission and
conditional disaggregation. A request counts when its first token comes within 1 s and the mean of
its gaps is at most 50 ms; one that is refused, or given up after five minutes, does not.

The highest rate that each system keeps up with is looked for too. At the rate that is asked for a
fast machine has little to do, and nobody can keep more than all: there both are compared again
where round robin keeps about as few as it does on a slow machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench import interrupts, mixed_load, streams, systems
from baton.bench.mixed_load import LONG, Answer, Arrival, Ask, Slo
from baton.bench.rate_search import GROWTH, RateSearch
from baton.bench.streams import Timed
from baton.client import errors
from baton.client.client import BatonClient
from baton.client.request import LaneName
from baton.load import stats
from baton.load.stats import Goal
from baton.runtime import demo_model

MODEL = "demo-88m"
ENGINE_ARGS = systems.engine_args(MODEL, max_num_seqs=64, enable_prefix_caching=False)
ROBIN, BATON = "round robin", "Baton"
SLO = Slo()
# The configuration of whoever has that SLO, for all requests.
SETTINGS = {
    "lanes": {
        "interactive": {"ttft_ms": round(SLO.ttft_s * 1e3), "itl_ms": round(SLO.itl_s * 1e3)},
        "batch": {"ttft_ms": round(SLO.ttft_s * 1e3)},
    },
    "decode": {"local_prefill": True},
}
READY_TIMEOUT_S = 300.0
# A vLLM rank spins for a second after its last step; the next system's turn begins after that.
SPIN_S = 1.5
# The share of requests that the highest rate keeps within the SLO.
KEPT_SHARE = 0.9
# That of round robin at 2 requests/s on the machine for which the goals were set: 57 to 65 %.
BUSY_SHARE = 0.61

SHARES = ("met_share", "shed_share", "short_met_share", "long_met_share")
LEAST_GOODPUT, LEAST_RATE = 1.4, 1.3
MOST = {"itl_p99_ms": 0.4, "ttft_p50_ms": 1.1, "ttft_p90_ms": 1.1, "ttft_p99_ms": 1.1}


@dataclass(slots=True)
class Load:
    """Pairs of runs at one rate.

    Attributes:
        name: what the rate is, in words.
        rate: requests/s.
        pairs: answers by system.
    """

    name: str
    rate: float
    pairs: list[dict[str, list[Answer]]] = field(default_factory=list)

    def summaries(self, system: str) -> list[dict[str, float]]:
        return [mixed_load.summary(pair[system], SLO) for pair in self.pairs]

    def medians(self, system: str) -> dict[str, float]:
        return medians(self.summaries(system))

    def ratios(self) -> dict[str, float]:
        """Baton's over round robin's of the same pair, medians; but for shares."""
        pairs = zip(self.summaries(BATON), self.summaries(ROBIN), strict=True)
        return medians(
            [
                {name: stats.ratio(own[name], base[name]) for name in own if name not in SHARES}
                for own, base in pairs
            ]
        )


@dataclass(slots=True)
class Results:
    """All that a run has seen.

    Attributes:
        loads: that which was asked for, then, if its rate was looked for, the busy one.
        searches: by system, for the highest rate; empty when none was made.
    """

    loads: list[Load] = field(default_factory=list)
    searches: dict[str, RateSearch] = field(default_factory=dict)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: stats.median([row[name] for row in rows]) for name in rows[0]}


async def run(arguments: argparse.Namespace) -> Results:
    results = Results()
    async with both() as asks:
        for name, ask in asks.items():
            load = mixed_load.arrivals("warm up", arguments.rate, arguments.warm_up)
            await turn(name, ask, load, "warm-up")
        if arguments.pairs:
            results.loads.append(Load("as asked for", arguments.rate))
            await measure(results.loads[-1], asks, arguments.pairs, arguments.requests)
        if arguments.search:
            results.searches = {
                name: RateSearch(KEPT_SHARE, arguments.rate * GROWTH) for name in asks
            }
            await search(results.searches, asks, arguments)
            if any(load.medians(ROBIN)["met_share"] <= BUSY_SHARE for load in results.loads):
                return results  # What was asked for was busy enough.
            # This machine's speed is not that of the next one: what is busy has to be found.
            busy = RateSearch(BUSY_SHARE, results.searches[ROBIN].rate or arguments.rate)
            await search({ROBIN: busy}, asks, arguments)
            if busy.rate:
                name = f"where round robin keeps about {BUSY_SHARE * 100:.0f} %"
                results.loads.append(Load(name, busy.rate))
                await measure(results.loads[-1], asks, arguments.busy_pairs, arguments.requests)
    return results


async def measure(load: Load, asks: Mapping[str, Ask], num_pairs: int, num_requests: int) -> None:
    for index in range(num_pairs):
        what = f"{load.rate:.2f} requests/s, pair {index}"
        arrivals = mixed_load.arrivals(f"pair {index}", load.rate, num_requests)
        order = list(asks) if index % 2 == 0 else list(asks)[::-1]
        load.pairs.append({name: await turn(name, asks[name], arrivals, what) for name in order})


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[dict[str, Ask]]:
    """Both systems started; whichever has no turn has nothing to do."""
    model = demo_model.ensure(MODEL)
    cores = sorted(os.sched_getaffinity(0))
    pair_cores = str(cores[0]), str(cores[1 % len(cores)])
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    with (
        systems.plain_pair(model, ENGINE_ARGS, pair_cores) as servers,
        systems.baton(model, ENGINE_ARGS, pair_cores, SETTINGS) as cluster,
    ):
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            BatonClient(cluster.coordinator.address) as client,
        ):
            await client.wait_ready(READY_TIMEOUT_S)
            in_turn = itertools.cycle(server.address for server in servers)

            async def ask_robin(arrival: Arrival) -> Timed | None:
                max_tokens, url = arrival.kind.output_tokens, next(in_turn)
                # An overloaded server refuses nothing; nobody waits longer for it.
                with contextlib.suppress(TimeoutError):
                    return await streams.through_vllm(http, url, arrival.prompt, max_tokens)
                return None

            async def ask_baton(arrival: Arrival) -> Timed | None:
                kind = arrival.kind
                lane: LaneName = "batch" if kind == LONG else "interactive"
                try:
                    return await streams.through_baton(
                        client, arrival.prompt, kind.output_tokens, lane
                    )
                except (errors.ResourceExhaustedError, errors.DeadlineExceededError):
                    return None

            yield {ROBIN: ask_robin, BATON: ask_baton}


async def turn(name: str, ask: Ask, load: list[Arrival], what: str) -> list[Answer]:
    await asyncio.sleep(SPIN_S)
    began = time.monotonic()
    answers = await mixed_load.open_loop(ask, load)
    spent_s, share = time.monotonic() - began, mixed_load.share_met(answers, SLO)
    line = f"{what}, {name}: {len(load)} requests in {spent_s:.0f} s, {share * 100:.0f} % within"
    print(line, file=sys.stderr, flush=True)
    return answers


async def search(
    searches: Mapping[str, RateSearch], asks: Mapping[str, Ask], arguments: argparse.Namespace
) -> None:
    """All at once, step by step: what changes on the machine meets every system."""
    for _ in range(arguments.search_steps):
        for name, one in searches.items():
            if one.is_done:
                continue
            rate = one.next_rate
            load = mixed_load.arrivals("search", rate, round(rate * arguments.search_seconds))
            answers = await turn(name, asks[name], load, f"{rate:.2f} requests/s")
            one.add(rate, mixed_load.share_met(answers, SLO))


def goals(results: Results) -> Iterator[Goal]:
    for load in results.loads:
        ratios, at = load.ratios(), f"{load.rate:.3g} requests/s, {load.name}: "
        what = at + "goodput / round robin's"
        yield Goal(what, ratios["goodput_per_s"], LEAST_GOODPUT, " x", at_least=True)
        for name, most in MOST.items():
            yield Goal(f"{at}{COLUMNS[name]} / round robin's", ratios[name], most, " x")
    if results.searches:
        what = f"highest rate with {KEPT_SHARE * 100:.0f} % within the SLO / round robin's"
        ratio = stats.ratio(results.searches[BATON].low, results.searches[ROBIN].low)
        yield Goal(what, ratio, LEAST_RATE, " x", at_least=True)


COLUMNS = {
    "goodput_per_s": "goodput/s",
    "met_share": "within",
    "shed_share": "no answer",
    "itl_p50_ms": "ITL p50",
    "itl_p99_ms": "ITL p99",
    "ttft_p50_ms": "TTFT p50",
    "ttft_p90_ms": "TTFT p90",
    "ttft_p99_ms": "TTFT p99",
    "e2e_p50_ms": "E2E p50",
    "e2e_p99_ms": "E2E p99",
}
BY_KIND = {"met_share": "within", **{f"ttft_p{at}_ms": f"TTFT p{at}" for at in (50, 90, 99)}}


def show(results: Results) -> None:
    for load in results.loads:
        show_load(load)
    rows = [
        [name, f"{rate:.2f}", f"{share * 100:.0f} %"]
        for name, one in results.searches.items()
        for rate, share in sorted(one.tried.items())
    ]
    if rows:
        stats.print_table("Rates tried", ["system", "requests/s", "within"], rows)
    stats.print_goals(list(goals(results)))


def show_load(load: Load) -> None:
    medians_of = {name: load.medians(name) for name in (ROBIN, BATON)}
    rows = [[name, *(shown(at, one[at]) for at in COLUMNS)] for name, one in medians_of.items()]
    ratios = load.ratios()
    over = ("" if at in SHARES else f"{ratios[at]:.2f}" for at in COLUMNS)
    rows.append(["  x round robin", *over])
    count = len(load.pairs[0][BATON])
    title = (
        f"{load.rate:.3g} requests/s ({load.name}), {count} requests, medians of "
        f"{len(load.pairs)} pairs (ms; ratios are medians of the pairs' own)"
    )
    stats.print_table(title, ["system", *COLUMNS.values()], rows)
    rows = [
        [name, kind, *(shown(at, one[f"{kind}_{at}"]) for at in BY_KIND)]
        for name, one in medians_of.items()
        for kind in ("short", "long")
    ]
    stats.print_table("By kind, ms", ["system", "kind", *BY_KIND.values()], rows)
    answers = [one for pair in load.pairs for one in pair[BATON]]
    rows = [
        [kind, stage, *(f"{stats.percentile(values, at):.1f}" for at in (50, 90, 99))]
        for kind, stage, values in mixed_load.stages(answers)
    ]
    stats.print_table("Where Baton's time went, ms", ["kind", "stage", "p50", "p90", "p99"], rows)


def shown(column: str, value: float) -> str:
    if column.endswith("_share"):
        return f"{value * 100:.1f} %"
    return f"{value:.2f}" if column == "goodput_per_s" else f"{value:.0f}"


def as_json(results: Results) -> dict[str, Any]:
    return {
        "model": MODEL,
        "engine_args": ENGINE_ARGS,
        "settings": SETTINGS,
        "loads": [
            {
                "name": load.name,
                "rate": load.rate,
                "pairs": [
                    {name: mixed_load.summary(answers, SLO) for name, answers in pair.items()}
                    for pair in load.pairs
                ],
                "medians": {name: load.medians(name) for name in (ROBIN, BATON)},
                "ratios": load.ratios(),
            }
            for load in results.loads
        ],
        "searches": {name: one.tried for name, one in results.searches.items()},
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(results)],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one pair of 60 requests, no search")
    parser.add_argument("--pairs", type=int, help="of runs; 5 unless told (1 with --quick)")
    parser.add_argument("--busy-pairs", type=int, default=5, help="of runs at the busy rate")
    parser.add_argument("--requests", type=int, help="of each run; 300 unless told (60)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--warm-up", type=int, default=24, help="requests before the first pair")
    parser.add_argument(
        "--search",
        action=argparse.BooleanOptionalAction,
        help="for the highest rate within the SLO, and for a busy one; on unless --quick",
    )
    parser.add_argument("--search-seconds", type=float, default=45.0, help="at each rate")
    parser.add_argument("--search-steps", type=int, default=6, help="at most")
    parser.add_argument("--json", type=Path, default=Path("bench/results/why.json"))
    arguments = parser.parse_args()
    if arguments.pairs is None:
        arguments.pairs = 1 if arguments.quick else 5
    if arguments.requests is None:
        arguments.requests = 60 if arguments.quick else 300
    if arguments.search is None:
        arguments.search = not arguments.quick
    for name in ("requests", "warm_up", "busy_pairs", "search_steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: must be at least 1")
    if arguments.pairs < (not arguments.search):
        parser.error("--pairs: must be at least 1, or 0 with a search")
    for name in ("rate", "search_seconds"):
        if not 0 < getattr(arguments, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')}: must be more than 0")
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    results = asyncio.run(run(arguments))
    stats.save(as_json(results), arguments.json)
    show(results)
    spent_s = time.monotonic() - started
    print(f"{spent_s:.0f} s; engines in {ENGINE_ARGS['dtype']}; figures in {arguments.json}")


if __name__ == "__main__":
    main()
