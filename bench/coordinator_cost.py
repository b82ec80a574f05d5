"""What the coordinator itself costs: per token, per request and per decision.

`python -m baton.bench.coordinator_cost --help`. A real coordinator process has a core to itself;
workers with prepared answers (cost_worker.py) and the client share the others, so that it is the
coordinator that is measured. "Direct" is the same worker serving the same client by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from baton.bench import scheduling_cost, stats, systems
from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Client, Loop, SessionClient, StreamsClient, wave
from baton.bench.cost_meter import Figures, Meter
from baton.bench.scheduling_cost import Scheduling
from baton.bench.stats import Reach

SESSION, SINGLE = "one session", "single streams"
PATHS: dict[str, type[SessionClient | StreamsClient]] = {
    SESSION: SessionClient,
    SINGLE: StreamsClient,
}
PACED, FLAT, ONE_TOKEN, DIRECT = "paced", "flat out", "one token", "direct"
KINDS = (PACED, FLAT, ONE_TOKEN, DIRECT)
MAX_REQUESTS = 4096
READY_TIMEOUT_S = 60.0
SETTLE_S = 0.5
# A run during which other processes took more of a core than this is repeated, so often at most.
MAX_OTHERS, MAX_TRIES = 0.1, 3
# Workers and waiting requests; one decision of the largest is held to a limit, and to growing
# no faster than the logarithm does: so many times, where the queue is so many times longer.
NUM_WORKERS, NUM_QUEUED, NUM_DECISIONS = (100, 1000), (1000, 10_000, 100_000), 400
MAX_DECISION_US = 200.0

# What sessions are held to.
MAX_CPU_MS_PER_1000_TOKENS, MAX_US_PER_TOKEN, MAX_CPU_MS_PER_REQUEST = 8.0, 1e6 / 150_000, 0.5
MAX_ADDED_TTFT_MS, MAX_RESIDENT_MB, REACH_REQUESTS = 1.5, 150.0, 256

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
CPU, cores and MB are the coordinator's process, all threads; "others" are cores that processes took
which are no part of this. TTFT and ITL in ms, as the client sees them: what the coordinator adds is
the difference to "direct". Paced: each request's next follows its last. Flat out: waves, each
decoded when all of its requests are there; TTFT and ITL say nothing there."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, over which kind of stream; `num_requests` at once."""

    path: str
    kind: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Results:
    """All that a run has seen."""

    figures: dict[Case, Figures]
    scheduling: list[Scheduling]


@dataclass(frozen=True, slots=True)
class Bench:
    """What all runs have in common.

    Attributes:
        cores: of the coordinator; everything else has the others.
        step_ms: from one token of a stream to the next, when paced.
    """

    cores: set[int]
    num_prompt_tokens: int
    num_tokens: int
    step_ms: float
    seconds: float
    num_decode_workers: int

    @contextlib.asynccontextmanager
    async def coordinator(self) -> AsyncIterator[systems.Process]:
        config = {
            "model": "demo",
            "served_model_name": MODEL,
            "engine": "simulated",
            "log_level": "warning",
            "lanes": {"interactive": {"max_queued": MAX_REQUESTS}},
            "prefill": {"max_requests_per_worker": MAX_REQUESTS},
            "decode": {"max_requests_per_worker": MAX_REQUESTS},
        }
        with contextlib.ExitStack() as stack:
            with pinned(self.cores):
                process = stack.enter_context(systems.coordinator(config))
            await ready(process)
            yield process

    async def measure(self, case: Case, coordinator: systems.Process) -> Figures:
        """One run; again while others disturb it."""
        tries = list[Figures]()
        while len(tries) < MAX_TRIES:
            tries.append(await self._measure(case, coordinator))
            if tries[-1].others <= MAX_OTHERS:
                break
        return min(tries, key=lambda one: one.others)

    async def _measure(self, case: Case, coordinator: systems.Process) -> Figures:
        num_tokens = 1 if case.kind == ONE_TOKEN else self.num_tokens
        step_ms = 0.0 if case.kind == FLAT else self.step_ms
        arguments = ["--tokens", f"{num_tokens}", "--step-ms", f"{step_ms}"]
        if case.kind == DIRECT:
            address, pid = f"127.0.0.1:{systems.free_port()}", None
            arguments += ["--listen", address]
        else:
            address, pid = coordinator.address, coordinator.popen.pid
            arguments += ["--coordinator", address, "--requests", f"{case.num_requests}"]
            arguments += ["--decode-workers", f"{self.num_decode_workers}"]
        with systems.module("baton.bench.cost_worker", arguments) as worker:
            await ready(worker)
            client = PATHS[case.path](
                address, case.num_requests, self.num_prompt_tokens, num_tokens
            )
            start = functools.partial(Meter, client, pid, worker.popen.pid)
            try:
                if case.kind == FLAT:
                    return await self._flat_out(client, case.num_requests, start)
                spread_s = self.step_ms / 1e3 * num_tokens
                async with Loop(client, case.num_requests, spread_s) as loop:
                    await loop.run(spread_s + SETTLE_S)
                    meter = start()
                    await loop.run(self.seconds)
                    return meter.stop()
            finally:
                await client.close()

    async def _flat_out(
        self, client: Client, num_requests: int, start: Callable[[], Meter]
    ) -> Figures:
        await wave(client, num_requests)
        meter, end = start(), time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            await wave(client, num_requests)
        return meter.stop()


@contextlib.contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """What is started meanwhile runs there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def ready(process: systems.Process) -> None:
    """Until it has said so."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while "ready" not in process.log.read_text():
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("it did not start")
        await asyncio.sleep(0.05)


async def run(arguments: argparse.Namespace) -> Results:
    *rest, last = sorted(os.sched_getaffinity(0))
    # gRPC's threads are not there yet: they will run where this one does.
    os.sched_setaffinity(0, set(rest) or {last})
    bench = Bench(
        {last},
        arguments.prompt_tokens,
        arguments.output_tokens,
        arguments.itl_ms,
        arguments.seconds,
        arguments.decode_workers,
    )
    runs: dict[Case, list[Figures]] = {}
    for repeat in range(arguments.repeats):
        for num_requests in arguments.requests:
            for path in arguments.paths:
                async with bench.coordinator() as coordinator:
                    for kind in arguments.kinds:
                        case = Case(path, kind, num_requests)
                        runs.setdefault(case, []).append(await bench.measure(case, coordinator))
                        progress(f"{repeat + 1} of {arguments.repeats}: {case}")
    return Results(
        {case: Figures.median(figures) for case, figures in runs.items()},
        list(measure_scheduling()) if arguments.scheduling else [],
    )


def measure_scheduling() -> Iterator[Scheduling]:
    for num_workers in NUM_WORKERS:
        for num_queued in NUM_QUEUED:
            yield scheduling_cost.measure(num_workers, num_queued, NUM_DECISIONS)
            progress(f"one decision: {num_workers} workers, {num_queued} queued")


def progress(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def reaches(results: Results) -> Iterator[Reach]:
    at = f"{SESSION}, {REACH_REQUESTS} at once: "
    paced, one_token, direct = (
        results.figures.get(Case(SESSION, kind, REACH_REQUESTS))
        for kind in (PACED, ONE_TOKEN, DIRECT)
    )
    if paced is not None:
        seen = paced.cpu_ms_per_1000_tokens
        yield Reach(at + "CPU per 1,000 tokens, paced", seen, MAX_CPU_MS_PER_1000_TOKENS, " ms")
        yield Reach(at + "resident", paced.resident_mb, MAX_RESIDENT_MB, " MB")
    if paced is not None and direct is not None:
        seen = paced.ttft_p50_ms - direct.ttft_p50_ms
        yield Reach(at + "TTFT p50 over direct", seen, MAX_ADDED_TTFT_MS, " ms")
    if one_token is not None:
        seen = one_token.cpu_ms_per_request
        yield Reach(at + "CPU per one-token request", seen, MAX_CPU_MS_PER_REQUEST, " ms")
    for case, figures in results.figures.items():
        if (case.path, case.kind) == (SESSION, FLAT):
            what = f"{SESSION}, {case.num_requests} at once, flat out: time per token"
            yield Reach(what, 1e6 / figures.tokens_per_s, MAX_US_PER_TOKEN, " us")
    if results.scheduling:
        shortest, longest = (
            next(
                one
                for one in results.scheduling
                if (one.num_workers, one.num_queued) == (max(NUM_WORKERS), num_queued)
            )
            for num_queued in (min(NUM_QUEUED), max(NUM_QUEUED))
        )
        yield Reach(f"one decision, {longest.name}", longest.decision_us, MAX_DECISION_US, " us")
        what = f"one decision, {longest.name} / {shortest.name}"
        growth = math.log(longest.num_queued) / math.log(shortest.num_queued)
        yield Reach(what, longest.decision_us / shortest.decision_us, growth, " x")


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
    rows = [
        [one.name, *(f"{us:.0f}" for us in (one.decision_us, one.p50_us, one.p99_us, one.end_us))]
        for one in results.scheduling
    ]
    header = ["", "decision", "event p50", "event p99", "event p50, nobody waits"]
    if rows:
        stats.print_table("One decision, us", header, rows)
    stats.print_reaches(list(reaches(results)))


def as_json(results: Results) -> dict[str, Any]:
    return {
        "cases": [asdict(case) | asdict(figures) for case, figures in results.figures.items()],
        "scheduling": [
            asdict(one) | {"decision_us": one.decision_us} for one in results.scheduling
        ],
        "reaches": [asdict(one) | {"reached": one.reached} for one in reaches(results)],
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 256, 1024], help="at once")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128, help="at least 2")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="of paced runs")
    parser.add_argument("--decode-workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--repeats", type=int, default=3, help="medians are shown")
    parser.add_argument("--no-scheduling", dest="scheduling", action="store_false")
    parser.add_argument("--quick", action="store_true", help="256 at once, two seconds, once")
    parser.add_argument("--json", type=Path, default=Path("bench/results/coordinator_cost.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.seconds, arguments.repeats = [REACH_REQUESTS], 2.0, 1
    if not all(1 <= one <= MAX_REQUESTS for one in arguments.requests):
        parser.error(f"--requests: must be from 1 to {MAX_REQUESTS}")
    if arguments.output_tokens < 2:
        parser.error("--output-tokens: must be at least 2, or there is nothing to decode")
    return arguments


def main() -> None:
    arguments = parsed()
    # Ends as Ctrl-C does: what was started is stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    started = time.monotonic()
    results = uvloop.run(run(arguments))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(as_json(results), indent=2) + "\n")
    show(results)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")


if __name__ == "__main__":
    main()
