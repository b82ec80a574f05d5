"""Compares Baton with two plain vLLM servers under a mixed load, on two cores or on one GPU.

`python -m baton.bench.colocated --help`. Every system has the same two engines, each on one core,
or both on one GPU: Baton's prefill and decode worker, strict, elastic, and elastic with longer
gaps, and two plain servers behind round robin and behind least loaded. All get the same requests at
the same times, one system after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import aiohttp

from baton.bench import gpu, interrupts, mixed_load, streams, systems
from baton.bench.mixed_load import Answer, Arrival, Kind, Mix, Slo
from baton.bench.streams import Timed
from baton.client.client import BatonClient
from baton.client.errors import ResourceExhaustedError
from baton.load import stats
from baton.runtime import demo_model

# A pause after requests that do not count, which end a vLLM rank's spinning.
SPIN_S = 1.5
# The process that keeps a core half busy: seconds of work, then of sleep.
HALF_BUSY = (
    "import os, time\n"
    "os.sched_setaffinity(0, {%d})\n"
    "while True:\n"
    "    end = time.perf_counter() + 0.02\n"
    "    while time.perf_counter() < end: pass\n"
    "    time.sleep(0.02)\n"
)
System = Literal["strict", "elastic", "long gaps", "round robin", "least loaded"]
SYSTEMS: tuple[System, ...] = get_args(System)
BATON: tuple[System, ...] = ("strict", "elastic", "long gaps")
MIXES = ("quarter", "long", "short")


@dataclass(frozen=True, slots=True)
class Ground:
    """The engines, and the load that fits them.

    Attributes:
        model: Name of a demo model.
        engine_args: Arguments of vLLM.
        slo: What a request must meet.
        mixes: Kinds of requests by name.
        uncounted_rate: Requests/s before the counted ones: every system has measured or compiled
            its steps then.
        cases: Mixes and rates that run by default.
        settings: Further settings of Baton.
        weights: Whether the engines need a checkpoint.
    """

    model: str
    engine_args: Mapping[str, Any]
    slo: Slo
    mixes: Mapping[str, Mix]
    uncounted_rate: float
    cases: Sequence[tuple[str, float]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    weights: bool = True

    def of(self, system: System) -> dict[str, Any]:
        """Returns the settings of one of Baton's systems."""
        ttft_ms, itl_ms = self.slo.ttft_s * 1e3, self.slo.itl_s * 1e3
        steps = {"steps": {"longest_gap_ms": 3 * itl_ms}} if system == "long gaps" else {}
        targets = {"interactive": {"ttft_ms": ttft_ms, "itl_ms": itl_ms}}
        return {
            **self.settings,
            **steps,
            "elastic": system != "strict",
            "scaling": {"targets": targets},
        }


def two_cores(engine_args: Mapping[str, Any]) -> Ground:
    arguments = {**systems.engine_args("demo-88m", 64), "max_num_batched_tokens": 2048}
    return Ground(
        model="demo-88m",
        engine_args={**arguments, **engine_args},
        slo=Slo(ttft_s=3.0, itl_s=0.05),
        mixes=_mixes(mixed_load.SHORT, mixed_load.LONG, mixed_load.Kind("short", 64, 256)),
        uncounted_rate=2.0,
        cases=[("quarter", 1.2), ("quarter", 2.0), ("quarter", 3.2), ("long", 1.8)],
    )


def one_gpu(engine_args: Mapping[str, Any]) -> Ground:
    short, long = mixed_load.Kind("short", 256, 128), mixed_load.Kind("long", 8000, 16)
    return Ground(
        model=gpu.MODEL,
        engine_args={
            **gpu.ENGINE_ARGS,
            # Two engines share the memory of the GPU.
            "gpu_memory_utilization": 0.42,
            "kv_cache_memory_bytes": 8 * gpu.LONGEST_PROMPT * gpu.TOKEN_BYTES,
            "max_num_seqs": 64,
            **engine_args,
        },
        slo=Slo(ttft_s=1.0, itl_s=0.03),
        mixes=_mixes(short, long, short),
        uncounted_rate=3.0,
        cases=[("quarter", 2.0), ("quarter", 4.0), ("long", 2.0)],
        settings={"kv_transfer": gpu.KV_TRANSFER},
        weights=False,
    )


def _mixes(short: Kind, long: Kind, alone: Kind) -> dict[str, Mix]:
    made = Mix(short, long), Mix(short, long, long_share=0.7), Mix(alone, long, long_share=0.0)
    return dict(zip(MIXES, made, strict=True))


def plain_sender(http: aiohttp.ClientSession, server: systems.Process) -> mixed_load.Send:
    async def send(arrival: Arrival) -> Timed:
        number = arrival.kind.output_tokens
        return await streams.through_vllm(http, server.address, arrival.prompt, number)

    return send


def round_robin(senders: Sequence[mixed_load.Send]) -> mixed_load.Send:
    turns = itertools.cycle(senders)

    async def send(arrival: Arrival) -> Timed | None:
        return await next(turns)(arrival)

    return send


@contextlib.asynccontextmanager
async def plain(
    ground: Ground, model: str, cores: tuple[str, str], wanted: Sequence[System]
) -> AsyncIterator[dict[System, mixed_load.Send]]:
    """Two plain servers, and the balancers in front of them."""
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    with systems.plain_pair(model, dict(ground.engine_args), cores) as servers:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            senders = [plain_sender(http, one) for one in servers]
            balancers = {
                "round robin": round_robin(senders),
                "least loaded": streams.least_loaded(senders),
            }
            yield {name: balancers[name] for name in wanted if name in balancers}


@contextlib.asynccontextmanager
async def baton(
    ground: Ground, model: str, cores: tuple[str, str], system: System
) -> AsyncIterator[mixed_load.Send]:
    arguments, settings = dict(ground.engine_args), ground.of(system)
    with systems.baton(model, arguments, cores, settings) as cluster:
        async with BatonClient(cluster.coordinator.address) as client:
            await cluster.wait_ready(client)

            async def send(arrival: Arrival) -> Timed | None:
                number = arrival.kind.output_tokens
                try:
                    return await streams.through_baton(client, arrival.prompt, number)
                except ResourceExhaustedError:
                    # Refused after `max_queue_s`: it has met no target.
                    return None

            yield send


def row(system: System, case: dict[str, Any], answers: list[Answer], slo: Slo) -> dict[str, Any]:
    """Returns the figures of one run."""
    found = mixed_load.summary(answers, slo)
    names = ("short_ttft_p50_ms", "short_ttft_p90_ms", "long_ttft_p50_ms", "itl_p99_ms")
    shares = ("met_share", "short_met_share", "long_met_share")
    return {
        "system": system,
        **case,
        **{name: round(found[name], 1) for name in names},
        **{name: round(found[name], 3) for name in shares},
    }


def budget(answers: list[Answer]) -> dict[str, list[float]]:
    """Returns the median and the 90th percentile of each stage, in ms, for Baton's requests."""
    return {
        f"{kind} {stage}": [
            round(statistics.median(values), 1),
            round(stats.percentile(values, 90), 1),
        ]
        for kind, stage, values in mixed_load.stages(answers)
    }


@contextlib.contextmanager
def half_busy(core: str, *, wanted: bool) -> Iterator[None]:
    """Keeps a core half busy with another process."""
    if not wanted:
        yield
        return
    with systems.code(HALF_BUSY % int(core)):
        yield


async def measure(given: argparse.Namespace, ground: Ground, model: str) -> None:
    """Prints one line of JSON per run, and saves all runs after each."""
    rows: list[dict[str, Any]] = []
    cores = sorted(os.sched_getaffinity(0))
    pair = str(cores[0]), str(cores[1 % len(cores)])
    cases = [
        {"mix": mix, "rate": rate, "seed": seed, "half_busy": busy}
        for mix, rate in given.cases or ground.cases
        for busy in ([False, True] if given.half_busy else [False])
        for seed in given.seeds
    ]

    async def run(system: System, send: mixed_load.Send) -> None:
        uncounted = mixed_load.arrivals(
            f"first {system}", ground.uncounted_rate, given.uncounted, ground.mixes["quarter"]
        )
        await mixed_load.open_loop(send, uncounted)
        for case in cases:
            await asyncio.sleep(SPIN_S)
            seed = f"{case['mix']} {case['rate']} {case['half_busy']} {case['seed']}"
            mix = ground.mixes[case["mix"]]
            # The plain servers get no prompt twice, so their prefix caches have no effect.
            shift = int(system == "least loaded")
            load = mixed_load.arrivals(seed, case["rate"], given.requests, mix, shift=shift)
            with half_busy(pair[0], wanted=case["half_busy"]):
                answers = await mixed_load.open_loop(send, load)
            rows.append(row(system, case, answers, ground.slo))
            print(json.dumps(rows[-1]), flush=True)
            stats.save(rows, given.json)
            if given.budget and system in BATON:
                print(json.dumps(budget(answers)), file=sys.stderr, flush=True)

    if {"round robin", "least loaded"} & set(given.systems):
        async with plain(ground, model, pair, given.systems) as senders:
            for name, send in senders.items():
                await run(name, send)
    for name in given.systems:
        if name in BATON:
            async with baton(ground, model, pair, name) as send:
                await run(name, send)


def case(text: str) -> tuple[str, float]:
    mix, _, rate = text.partition(":")
    if mix not in MIXES:
        raise argparse.ArgumentTypeError(f"{text!r}: the mix must be one of {', '.join(MIXES)}")
    return mix, float(rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument(
        "--cases",
        type=case,
        nargs="+",
        help="MIX:RATE in requests/s. Mixes: quarter (a quarter of the prompts is long), long "
        "(70 %% are), short (none is).",
    )
    parser.add_argument("--requests", type=int, default=60, help="Requests of one run.")
    parser.add_argument(
        "--uncounted", type=int, default=16, help="Requests before the counted ones."
    )
    parser.add_argument("--seeds", nargs="+", default=["1"], help="Seeds of the requests.")
    parser.add_argument(
        "--half-busy", action="store_true", help="Repeat each run with one core half busy."
    )
    parser.add_argument(
        "--budget", action="store_true", help="Print the stages of Baton's requests to stderr."
    )
    parser.add_argument(
        "--gpu", action="store_true", help="An 8B model with random weights; both engines share it."
    )
    parser.add_argument(
        "--engine-args", type=json.loads, default={}, help="Further arguments of vLLM, as JSON."
    )
    parser.add_argument("--json", type=Path, default=Path("bench/results/colocated.json"))
    given = parser.parse_args()
    interrupts.on_sigterm()
    ground = (one_gpu if given.gpu else two_cores)(given.engine_args)
    with tempfile.TemporaryDirectory() as root:
        directory = None if ground.weights else Path(root)
        model = demo_model.ensure(ground.model, weights=ground.weights, root=directory)
        asyncio.run(measure(given, ground, model))


if __name__ == "__main__":
    main()
