"""Measures the CPU time and latency of the coordinator per token, per request and per decision.

`python -m baton.bench.coordinator_cost --help`. A real coordinator process has a core to itself.
Workers with prepared answers (cost_worker.py) and the client share the other cores, so that the
coordinator is the bottleneck. "Direct" is the same worker serving the same client without a
coordinator. "Bare relay" is the cost of gRPC alone: a process that forwards the same number of
messages without parsing them (bare_relay.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from baton.bench import interrupts, scheduling_cost, systems
from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Client, Loop, SessionClient, StreamsClient, wave
from baton.bench.cost_meter import Figures, Meter
from baton.bench.cost_report import (
    DIRECT,
    GOAL_REQUESTS,
    KINDS,
    NUM_QUEUED,
    NUM_WORKERS,
    ONE_TOKEN,
    PATHS,
    RELAY_ONE_TOKEN,
    SESSION,
    SINGLE,
    Case,
    Results,
    as_json,
    show,
)
from baton.bench.scheduling_cost import Scheduling
from baton.load import stats

CLIENTS: dict[str, type[SessionClient | StreamsClient]] = {
    SESSION: SessionClient,
    SINGLE: StreamsClient,
}
MAX_REQUESTS = 4096
# Bounds hangs: a busy machine starts a process slowly.
READY_TIMEOUT_S = 300.0
SETTLE_S = 0.5
# A run is repeated if other processes used more than this share of a core; largest number of runs.
MAX_OTHERS, MAX_TRIES = 0.1, 3
NUM_DECISIONS = 400


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings that all runs share.

    Attributes:
        cores: Cores of the coordinator; all other processes run on the other cores.
        step_ms: Time between two tokens of a stream in paced runs.
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

    @contextlib.asynccontextmanager
    async def relay(self) -> AsyncIterator[systems.Process]:
        address = f"127.0.0.1:{systems.free_port()}"
        with contextlib.ExitStack() as stack:
            with pinned(self.cores):
                process = stack.enter_context(systems.module("baton.bench.bare_relay", [address]))
            await ready(process)
            yield replace(process, address=address)

    async def measure(self, case: Case, server: systems.Process) -> Figures:
        """Measures one case; repeats the run if other processes disturb it.

        Args:
            case: The load and the kind of run.
            server: Coordinator or relay.
        """
        tries = list[Figures]()
        while len(tries) < MAX_TRIES:
            tries.append(await self._measure(case, server))
            if tries[-1].others <= MAX_OTHERS:
                break
        return min(tries, key=lambda one: one.others)

    async def _measure(self, case: Case, server: systems.Process) -> Figures:
        num_tokens = 1 if case.kind in (ONE_TOKEN, RELAY_ONE_TOKEN) else self.num_tokens
        step_ms = 0.0 if case.is_flat_out else self.step_ms
        address = server.address
        pid: int | None = server.popen.pid
        program, arguments = "baton.bench.cost_worker", ["--coordinator", address]
        if case.is_relayed:
            program, arguments = "baton.bench.relay_worker", ["--relay", address]
        elif case.kind == DIRECT:
            address, pid = f"127.0.0.1:{systems.free_port()}", None
            arguments = ["--listen", address]
        arguments += ["--tokens", f"{num_tokens}", "--step-ms", f"{step_ms}"]
        arguments += ["--requests", f"{case.num_requests}"]
        if not case.is_relayed:
            arguments += ["--decode-workers", f"{self.num_decode_workers}"]
        with systems.module(program, arguments) as worker:
            await ready(worker)
            client = CLIENTS[case.path](
                address, case.num_requests, self.num_prompt_tokens, num_tokens
            )
            start = functools.partial(Meter, client, pid, worker.popen.pid)
            try:
                if case.is_flat_out:
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
    """Processes that are started inside the block run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def ready(process: systems.Process) -> None:
    """Waits until the process has logged "ready"."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while "ready" not in process.log.read_text(encoding="utf-8", errors="replace"):
        if process.popen.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.popen.args!r}: did not start")
        await asyncio.sleep(0.05)


async def run(arguments: argparse.Namespace) -> Results:
    *rest, last = sorted(os.sched_getaffinity(0))
    # gRPC has not started its threads yet; they inherit the affinity of this thread.
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
                cases = [Case(path, kind, num_requests) for kind in arguments.kinds]
                relayed = [case for case in cases if case.is_relayed and path == SESSION]
                own = [case for case in cases if not case.is_relayed]
                for start, measured in ((bench.coordinator, own), (bench.relay, relayed)):
                    if not measured:
                        continue
                    async with start() as server:
                        for case in measured:
                            runs.setdefault(case, []).append(await bench.measure(case, server))
                            progress(f"{repeat + 1} of {arguments.repeats}: {case}")
    return Results(
        {case: stats.medians(figures) for case, figures in runs.items()},
        list(measure_scheduling()) if arguments.scheduling else [],
    )


def measure_scheduling() -> Iterator[Scheduling]:
    for num_workers in NUM_WORKERS:
        for num_queued in NUM_QUEUED:
            yield scheduling_cost.measure(num_workers, num_queued, NUM_DECISIONS)
            progress(f"one decision: {num_workers} workers, {num_queued} queued")


def progress(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[64, 256, 1024], help="concurrency"
    )
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128, help="at least 2")
    parser.add_argument("--itl-ms", type=float, default=20.0, help="ITL of paced runs")
    parser.add_argument("--decode-workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs per case; prints medians")
    parser.add_argument("--no-scheduling", dest="scheduling", action="store_false")
    parser.add_argument("--quick", action="store_true", help="concurrency 256, one run of 2 s")
    parser.add_argument("--json", type=Path, default=Path("bench/results/coordinator_cost.json"))
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.seconds, arguments.repeats = [GOAL_REQUESTS], 2.0, 1
    if not all(1 <= one <= MAX_REQUESTS for one in arguments.requests):
        parser.error(f"--requests: must be from 1 to {MAX_REQUESTS}")
    if arguments.output_tokens < 2:
        parser.error("--output-tokens: must be at least 2, or there is nothing to decode")
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    results = uvloop.run(run(arguments))
    stats.save(as_json(results), arguments.json)
    show(results)
    print(f"{time.monotonic() - started:.0f} s; figures in {arguments.json}")


if __name__ == "__main__":
    main()
