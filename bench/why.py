"""Compares one prefill and one decode worker with two plain vLLM servers: why disaggregate.

`make bench`, or `python -m baton.bench.why --help`. Both systems use the same two cores and get the
same requests at the same times. They run one after the other, in an order that alternates between
pairs of runs. Requests go to the plain servers in turn (round robin); Baton has a coordinator with
lanes, admission and conditional disaggregation. A request meets the SLO if its first token arrives
within 1 s and its mean gap is at most 50 ms. Refused requests and requests that time out after five
minutes do not meet the SLO, and count as an infinite TTFT; the tables have their share.

The benchmark also searches for the highest rate that each system can keep. At the requested rate a
fast machine is almost idle, and both systems meet the SLO for nearly all requests. On such a
machine the systems are compared again at a rate at which round robin meets the SLO for about the
same share of requests as on a slow machine.
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
from baton.bench.mixed_load import LONG, Answer, Arrival, Send, Slo
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
# The configuration of an operator with this SLO for all requests.
SETTINGS = {
    "lanes": {
        "interactive": {"ttft_ms": round(SLO.ttft_s * 1e3), "itl_ms": round(SLO.itl_s * 1e3)},
        "batch": {"ttft_ms": round(SLO.ttft_s * 1e3)},
    },
    "elastic": False,
    "decode": {"local_prefill": True},
}
# A vLLM rank spins for a second after its last step; the next system's run begins after that.
SPIN_S = 1.5
# A rate counts as kept if this share of the requests meets the SLO.
KEPT_SHARE = 0.9
# Share of requests that met the SLO with round robin at 2 requests/s on the machine for which the
# goals were set: 57 to 65 %.
BUSY_SHARE = 0.61

SHARES = tuple(
    f"{kind}{share}_share" for kind in ("", "short_", "long_") for share in ("met", "shed")
)
# Goals: Baton / round robin.
MIN_GOODPUT, MIN_RATE = 1.4, 1.3
MAX_RATIOS = {"itl_p99_ms": 0.4, "ttft_p50_ms": 1.1, "ttft_p90_ms": 1.1, "ttft_p99_ms": 1.1}


@dataclass(slots=True)
class Load:
    """Pairs of runs at one rate.

    Attributes:
        name: Description of the rate.
        rate: Requests/s.
        pairs: For each pair, the answers by system.
    """

    name: str
    rate: float
    pairs: list[dict[str, list[Answer]]] = field(default_factory=list)

    def summaries(self, system: str) -> list[dict[str, float]]:
        return [mixed_load.summary(pair[system], SLO) for pair in self.pairs]

    def medians(self, system: str) -> dict[str, float]:
        return medians(self.summaries(system))

    def ratios(self) -> dict[str, float]:
        """Returns the medians of Baton / round robin within a pair; shares are left out."""
        pairs = zip(self.summaries(BATON), self.summaries(ROBIN), strict=True)
        return medians(
            [
                {name: stats.ratio(own[name], base[name]) for name in own if name not in SHARES}
                for own, base in pairs
            ]
        )


@dataclass(slots=True)
class Results:
    """All measurements of the benchmark.

    Attributes:
        loads: The requested load, then the busy load if there was a search for its rate.
        searches: Searches for the highest rate, by system; empty without a search.
    """

    loads: list[Load] = field(default_factory=list)
    searches: dict[str, RateSearch] = field(default_factory=dict)


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: stats.median([row[name] for row in rows]) for name in rows[0]}


async def run(arguments: argparse.Namespace) -> Results:
    results = Results()
    async with both() as senders:
        for name, send in senders.items():
            load = mixed_load.arrivals("warm up", arguments.rate, arguments.warm_up)
            await turn(name, send, load, "warm-up")
        if arguments.pairs:
            results.loads.append(Load("as requested", arguments.rate))
            await measure(results.loads[-1], senders, arguments.pairs, arguments.requests)
        if arguments.search:
            results.searches = {
                name: RateSearch(KEPT_SHARE, arguments.rate * GROWTH) for name in senders
            }
            await search(results.searches, senders, arguments)
            if any(load.medians(ROBIN)["met_share"] <= BUSY_SHARE for load in results.loads):
                return results  # The requested load was busy enough.
            # The rate of a busy load depends on the speed of the machine.
            busy = RateSearch(BUSY_SHARE, results.searches[ROBIN].rate or arguments.rate)
            await search({ROBIN: busy}, senders, arguments)
            if busy.rate:
                name = f"round robin meets the SLO for about {BUSY_SHARE * 100:.0f} %"
                results.loads.append(Load(name, busy.rate))
                await measure(results.loads[-1], senders, arguments.busy_pairs, arguments.requests)
    return results


async def measure(
    load: Load, senders: Mapping[str, Send], num_pairs: int, num_requests: int
) -> None:
    for index in range(num_pairs):
        what = f"{load.rate:.2f} requests/s, pair {index}"
        arrivals = mixed_load.arrivals(f"pair {index}", load.rate, num_requests)
        order = list(senders) if index % 2 == 0 else list(senders)[::-1]
        load.pairs.append({name: await turn(name, senders[name], arrivals, what) for name in order})


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[dict[str, Send]]:
    """Starts both systems; only one of them gets requests at a time."""
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
            await cluster.wait_ready(client)
            in_turn = itertools.cycle(server.address for server in servers)

            async def send_round_robin(arrival: Arrival) -> Timed | None:
                max_tokens, url = arrival.kind.output_tokens, next(in_turn)
                # An overloaded vLLM server refuses no request, so requests end by timeout.
                with contextlib.suppress(TimeoutError):
                    return await streams.through_vllm(http, url, arrival.prompt, max_tokens)
                return None

            async def send_to_baton(arrival: Arrival) -> Timed | None:
                kind = arrival.kind
                lane: LaneName = "batch" if kind == LONG else "interactive"
                try:
                    return await streams.through_baton(
                        client, arrival.prompt, kind.output_tokens, lane
                    )
                except (errors.ResourceExhaustedError, errors.DeadlineExceededError):
                    return None

            yield {ROBIN: send_round_robin, BATON: send_to_baton}


async def turn(name: str, send: Send, load: list[Arrival], what: str) -> list[Answer]:
    await asyncio.sleep(SPIN_S)
    began = time.monotonic()
    answers = await mixed_load.open_loop(send, load)
    spent_s, share = time.monotonic() - began, mixed_load.share_met(answers, SLO)
    line = f"{what}, {name}: {len(load)} requests in {spent_s:.0f} s, {share * 100:.0f} % within"
    print(line, file=sys.stderr, flush=True)
    return answers


async def search(
    searches: Mapping[str, RateSearch], senders: Mapping[str, Send], arguments: argparse.Namespace
) -> None:
    """Alternates the steps of all searches, so that noise of the machine affects all systems."""
    for _ in range(arguments.search_steps):
        for name, one in searches.items():
            if one.is_done:
                continue
            rate = one.next_rate
            load = mixed_load.arrivals("search", rate, round(rate * arguments.search_seconds))
            answers = await turn(name, senders[name], load, f"{rate:.2f} requests/s")
            one.add(rate, mixed_load.share_met(answers, SLO))


def goals(results: Results) -> Iterator[Goal]:
    for load in results.loads:
        ratios, at = load.ratios(), f"{load.rate:.3g} requests/s, {load.name}: "
        what = at + "goodput / round robin's"
        yield Goal(what, ratios["goodput_per_s"], MIN_GOODPUT, " x", at_least=True)
        for name, most in MAX_RATIOS.items():
            yield Goal(f"{at}{COLUMNS[name]} / round robin's", ratios[name], most, " x")
    if results.searches:
        what = f"highest rate with {KEPT_SHARE * 100:.0f} % within the SLO / round robin's"
        ratio = stats.ratio(results.searches[BATON].low, results.searches[ROBIN].low)
        yield Goal(what, ratio, MIN_RATE, " x", at_least=True)


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
BY_KIND = {
    "met_share": "within",
    "shed_share": "no answer",
    **{f"ttft_p{at}_ms": f"TTFT p{at}" for at in (50, 90, 99)},
}


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
    stats.print_table(
        "Latency budget of Baton's requests, ms", ["kind", "stage", "p50", "p90", "p99"], rows
    )


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
    parser.add_argument("--pairs", type=int, help="pairs of runs (default: 5; 1 with --quick)")
    parser.add_argument("--busy-pairs", type=int, default=5, help="pairs of runs at the busy rate")
    parser.add_argument("--requests", type=int, help="per run (default: 300; 60 with --quick)")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--warm-up", type=int, default=24, help="requests before the first pair")
    parser.add_argument(
        "--search",
        action=argparse.BooleanOptionalAction,
        help="search for the highest rate within the SLO (default: on, off with --quick)",
    )
    parser.add_argument("--search-seconds", type=float, default=45.0, help="duration at each rate")
    parser.add_argument("--search-steps", type=int, default=6, help="largest number of rates")
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
