"""Measures lane isolation and overload with real processes.

`make bench`, or `python -m baton.bench.pressure --help`. Four prefill and four decode workers on
the simulated engine, a coordinator, and a client with one session run as separate processes over
loopback. An engine step takes tens of milliseconds, so that the workers are the bottleneck and not
the machine; the table shows how busy the machine was.

Isolation: interactive requests at 30 % of the workers' capacity, a batch flood at 300 %, and both
together. Overload: interactive requests with a TTFT target at 100 % and at 200 % of the capacity.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from baton.bench import interrupts
from baton.bench.chaos_cell import POOLS, Cell
from baton.bench.mixed_load import TOKEN_IDS, Slo
from baton.client import BatonClient, Tokens
from baton.client.errors import ResourceExhaustedError
from baton.client.request import LaneName
from baton.client.request import Slo as WantedSlo
from baton.client.stream import TokenStream
from baton.load import stats
from baton.load.stats import Goal
from baton.runtime import demo_model

NUM_PAIRS = 4
# Step times of the simulated engine in ms, and the coordinator's initial estimate.
LATENCY = {
    "prefill_base_ms": 10.0,
    "prefill_per_token_ms": 0.8,
    "prefill_per_token_squared_ms": 0.0,
    "step_base_ms": 20.0,
    "step_per_request_ms": 0.2,
    "step_per_kv_token_ms": 0.0,
}
CHUNK_TOKENS = 64
PROMPT_TOKENS = (50, 450)
OUTPUT_TOKENS: dict[LaneName, tuple[int, int]] = {"interactive": (25, 75), "batch": (10, 40)}
# Requests/s with PROMPT_TOKENS that the prefill workers can serve.
CAPACITY = 16.0
INTERACTIVE_SHARE, FLOOD, OVERLOAD = 0.3, 3.0, 2.0
# ITL target of the interactive lane; batch requests may only use what this target leaves.
ITL_MS = 30
SLO = Slo(ttft_s=1.2, itl_s=0.1)
REFUSED_WITHIN_S = 0.05
SETTLE_TIMEOUT_S = 60.0

ALONE, FLOODED, BOTH = "interactive alone", "flood alone", "both"
# Goals; `goals` says to which ratio each of them belongs.
MAX_SLOWDOWN, MIN_TOKENS, MIN_BATCH_TOKENS = 1.25, 0.95, 0.5
MIN_MET, MIN_GOODPUT = 0.99, 0.95


@dataclass(slots=True)
class Seen:
    """One request and its answer; times are seconds of the monotonic clock.

    Attributes:
        at: Submission.
        times: Arrival of each token.
        refused_at: Refusal; None if the request was admitted.
    """

    lane: LaneName
    num_prompt_tokens: int
    num_output_tokens: int
    at: float
    times: list[float] = field(default_factory=list)
    refused_at: float | None = None

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.at

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    def met(self, slo: Slo) -> bool:
        if len(self.times) < self.num_output_tokens:
            return False
        gaps = self.gaps_s
        return self.ttft_s <= slo.ttft_s and sum(gaps) / max(1, len(gaps)) <= slo.itl_s


@dataclass(slots=True)
class Run:
    """The run of one load. Only events between `begin` and `end` count.

    Attributes:
        busy: Share of the machine's CPU time that all processes used.
    """

    seen: list[Seen]
    begin: float
    end: float
    busy: float = 0.0

    def arrived(self, lane: LaneName = "interactive") -> list[Seen]:
        return [one for one in self.seen if one.lane == lane and self.begin <= one.at < self.end]

    def tokens_per_s(self, *lanes: LaneName) -> float:
        """Returns prompt tokens computed plus output tokens generated, per second."""
        num_tokens = 0
        for one in self.seen:
            if one.lane in lanes:
                num_tokens += sum(self.begin <= at < self.end for at in one.times)
                if one.times and self.begin <= one.times[0] < self.end:
                    num_tokens += one.num_prompt_tokens
        return num_tokens / (self.end - self.begin)

    def figures(self) -> dict[str, float]:
        """Returns the figures of the run; the names end with the unit."""
        arrived = self.arrived()
        answered = [one for one in arrived if one.times]
        ttfts = [one.ttft_s * 1e3 for one in answered]
        gaps = [gap * 1e3 for one in answered for gap in one.gaps_s]
        refused = [one.refused_at - one.at for one in arrived if one.refused_at is not None]
        num_good = sum(one.met(SLO) for one in arrived)
        return {
            "num_interactive": len(arrived),
            "ttft_p50_ms": stats.percentile(ttfts, 50),
            "ttft_p99_ms": stats.percentile(ttfts, 99),
            "itl_p50_ms": stats.percentile(gaps, 50),
            "itl_p99_ms": stats.percentile(gaps, 99),
            "interactive_tokens_per_s": self.tokens_per_s("interactive"),
            "batch_tokens_per_s": self.tokens_per_s("batch"),
            "num_refused": len(refused),
            "refused_max_ms": max(refused, default=0.0) * 1e3,
            "met_share": num_good / max(1, len(arrived) - len(refused)),
            "goodput_per_s": num_good / (self.end - self.begin),
            "busy": self.busy,
        }


def config(model: str) -> dict[str, Any]:
    free = {"max_queued": 10**6, "max_queue_s": 3600}
    return {
        "model": model,
        "served_model_name": "pressure",
        "engine": "simulated",
        "log_level": "warning",
        "coordinator": {"max_running_requests": 10**6, "max_requests_per_session": 10**6},
        "lanes": {"interactive": {**free, "itl_ms": ITL_MS}, "batch": free},
        "decode": {"local_prefill": False},
        "latency": LATENCY,
        "simulated": {
            **LATENCY,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "max_num_seqs": 128,
            "kv_tokens": 2**17,
        },
        "kv_transfer": {"send_bytes": 2**25, "receive_bytes": 2**25},
    }


async def offer(
    name: str,
    address: str,
    rates: dict[LaneName, float],
    arguments: argparse.Namespace,
    *,
    slo: Slo | None = None,
) -> Run:
    """Sends Poisson arrivals for the configured time.

    Args:
        name: Name of the load. Loads with other names have the same arrivals and lengths, but
            other prompts.
        address: Address of the coordinator.
        rates: Requests/s by lane.
        arguments: Durations and seed.
        slo: SLO of the requests. With an SLO the run ends when all requests have ended. Without
            one, requests that are still running at the end are cancelled.
    """
    now = time.monotonic()
    run = Run([], now + arguments.warm_up_s, now + arguments.warm_up_s + arguments.lasts_s)
    async with BatonClient(address, max_requests=10**6) as client:
        reading: set[asyncio.Task[None]] = set()

        async def arrive(lane: LaneName, rate: float) -> None:
            source, at = random.Random(f"{arguments.seed} {lane} {rate}"), now
            token_source = random.Random(f"{arguments.seed} {lane} {name}")
            while (at := at + source.expovariate(rate)) < run.end:
                prompt = token_source.choices(TOKEN_IDS, k=source.randint(*PROMPT_TOKENS))
                num_output = source.randint(*OUTPUT_TOKENS[lane])
                await asyncio.sleep(at - time.monotonic())
                seen = Seen(lane, len(prompt), num_output, time.monotonic())
                run.seen.append(seen)
                wanted = WantedSlo(ttft_ms=round(slo.ttft_s * 1e3)) if slo is not None else None
                stream = client.generate(
                    prompt, max_tokens=num_output, ignore_eos=True, lane=lane, slo=wanted
                )
                task = asyncio.create_task(read(stream, seen))
                reading.add(task)
                task.add_done_callback(reading.discard)

        psutil.cpu_percent()
        await asyncio.gather(*(arrive(lane, rate) for lane, rate in rates.items()))
        run.busy = psutil.cpu_percent() / 100
        if slo is not None:
            await asyncio.gather(*reading)
        for task in list(reading):
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return run


async def read(stream: TokenStream, seen: Seen) -> None:
    try:
        async with stream:
            async for event in stream:
                if isinstance(event, Tokens):
                    seen.times += [time.monotonic()] * len(event.token_ids)
    except ResourceExhaustedError:
        seen.refused_at = time.monotonic()


async def runs(arguments: argparse.Namespace, directory: Path, model: str) -> dict[str, Run]:
    """Runs all loads one after another on the same processes."""
    found: dict[str, Run] = {}
    async with Cell(directory, config(model)) as cell:
        for pool in POOLS:
            for _ in range(NUM_PAIRS):
                cell.start_worker(pool)
        await cell.all_serve()
        interactive: dict[LaneName, float] = {"interactive": INTERACTIVE_SHARE * CAPACITY}
        flood: dict[LaneName, float] = {"batch": FLOOD * CAPACITY}
        loads: list[tuple[str, dict[LaneName, float], Slo | None]] = [
            (ALONE, interactive, None),
            (FLOODED, flood, None),
            (BOTH, interactive | flood, None),
            (at_load(1.0), {"interactive": CAPACITY}, SLO),
            (at_load(OVERLOAD), {"interactive": OVERLOAD * CAPACITY}, SLO),
        ]
        for name, rates, slo in loads:
            found[name] = await offer(name, cell.address, rates, arguments, slo=slo)
            print(f"{name}: {len(found[name].seen)} requests", file=sys.stderr, flush=True)
            if held := await cell.settled(SETTLE_TIMEOUT_S):
                raise RuntimeError(f"resources still held after {name}: {', '.join(held)}")
    return found


def at_load(load: float) -> str:
    return f"{load:g} x capacity"


def goals(found: dict[str, Run]) -> Iterator[Goal]:
    alone, flooded, both = (found[name].figures() for name in (ALONE, FLOODED, BOTH))
    for name, what in (("ttft_p99_ms", "TTFT p99"), ("itl_p99_ms", "ITL p99")):
        ratio = stats.ratio(both[name], alone[name])
        yield Goal(f"interactive {what} with a flood / without", ratio, MAX_SLOWDOWN, " x")
    tokens = both["interactive_tokens_per_s"] + both["batch_tokens_per_s"]
    base = flooded["batch_tokens_per_s"]
    what = "tokens/s with both / flood alone"
    yield Goal(what, stats.ratio(tokens, base), MIN_TOKENS, " x", at_least=True)
    what = "batch tokens/s with both / flood alone"
    batch = stats.ratio(both["batch_tokens_per_s"], base)
    yield Goal(what, batch, MIN_BATCH_TOKENS, " x", at_least=True)
    full, over = (found[at_load(load)].figures() for load in (1.0, OVERLOAD))
    what = "overload: admitted requests that met their SLO"
    yield Goal(what, over["met_share"] * 100, MIN_MET * 100, " %", at_least=True)
    yield Goal("overload: slowest refusal", over["refused_max_ms"], REFUSED_WITHIN_S * 1e3, " ms")
    what = "overload: goodput / at capacity"
    ratio = stats.ratio(over["goodput_per_s"], full["goodput_per_s"])
    yield Goal(what, ratio, MIN_GOODPUT, " x", at_least=True)


def show(found: dict[str, Run]) -> None:
    columns = {
        "num_interactive": "requests",
        "ttft_p50_ms": "TTFT p50",
        "ttft_p99_ms": "TTFT p99",
        "itl_p50_ms": "ITL p50",
        "itl_p99_ms": "ITL p99",
        "interactive_tokens_per_s": "tokens/s",
        "batch_tokens_per_s": "batch tokens/s",
        "num_refused": "refused",
        "refused_max_ms": "slowest refusal",
        "goodput_per_s": "goodput/s",
    }
    rows: list[Sequence[str]] = []
    for name, run in found.items():
        figures = run.figures()
        shown = [
            f"{figures[at]:.1f}" if figures[at] < 100 else f"{figures[at]:.0f}" for at in columns
        ]
        share = f"{figures['met_share']:.1%}" if "capacity" in name else ""
        rows.append([name, *shown, share, f"{figures['busy']:.0%}"])
    title = (
        f"{NUM_PAIRS} + {NUM_PAIRS} workers, {CAPACITY:g} requests/s of capacity; interactive, ms"
    )
    stats.print_table(title, ["load", *columns.values(), "met SLO", "cores busy"], rows)
    stats.print_goals(list(goals(found)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="15 s of each load")
    parser.add_argument("--lasts-s", type=float, default=40.0, help="duration of each load")
    parser.add_argument("--warm-up-s", type=float, default=6.0, help="before each load")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("bench/results/pressure.json"))
    arguments = parser.parse_args()
    interrupts.on_sigterm()
    if arguments.quick:
        arguments.lasts_s = 15.0
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    model = demo_model.ensure("demo", weights=False)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        found = asyncio.run(runs(arguments, Path(directory), model))
    results = {
        "loads": {name: run.figures() for name, run in found.items()},
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(found)],
    }
    stats.save(results, arguments.json)
    show(found)
    print(f"figures in {arguments.json}")


if __name__ == "__main__":
    main()
