"""Compares vLLM's scheduler with Baton's, which bounds steps by the ITL target, on one engine.

`python -m baton.bench.step_budget --help`. One vLLM engine on one core runs without a coordinator.
Short and long prompts arrive at random times; the requests are the same for both schedulers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, get_args

from baton.bench import mixed_load, systems
from baton.bench.mixed_load import Answer, Arrival, Slo
from baton.bench.streams import Timed
from baton.engine.base import EngineRequest
from baton.engine.served_model import ServedModel
from baton.engine.vllm_engine import VllmEngine
from baton.engine.warm_up import warm_up
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime import demo_model
from baton.runtime.config import KvTransferConfig, StepsConfig
from baton.runtime.process.affinity import VLLM_BIND_THREADS
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2

MODEL = "demo-88m"
SLO = Slo(ttft_s=3.0, itl_s=0.05)
STAGING = KvTransferConfig(send_bytes=2**24, receive_bytes=2**24)
# A pause after requests that do not count, which end a vLLM rank's spinning.
SPIN_S = 1.5
NUM_UNCOUNTED = 4

Scheduler = Literal["vllm", "baton"]
SCHEDULERS: tuple[Scheduler, ...] = get_args(Scheduler)


class Streams:
    """The running requests of one engine."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._timed: dict[str, tuple[Timed, float, asyncio.Event]] = {}
        self._num_sent = 0

    async def run(self) -> None:
        """Takes the engine's outputs until it is cancelled."""
        while True:
            step = await self._engine.next_step()
            now = time.perf_counter()
            for output in step.outputs:
                timed, sent_at, ended = self._timed[output.engine_request_id]
                timed.add(output.token_ids, now - sent_at)
                if output.finish is not None:
                    ended.set()

    async def send(self, arrival: Arrival) -> Timed:
        """Runs one request; returns its tokens."""
        self._num_sent += 1
        name, timed, ended = f"r{self._num_sent}", Timed(), asyncio.Event()
        self._timed[name] = (timed, time.perf_counter(), ended)
        sampling = common_pb2.SamplingParams(
            max_tokens=arrival.kind.output_tokens, temperature=0.0, ignore_eos=True
        )
        await self._engine.submit(EngineRequest(name, arrival.prompt, sampling))
        await ended.wait()
        return timed


@contextlib.asynccontextmanager
async def running(
    scheduler: Scheduler, arguments: dict[str, Any], directory: Path
) -> AsyncIterator[Streams]:
    """One engine with this scheduler."""
    async with contextlib.AsyncExitStack() as stack:
        socket_path = str(directory / f"{scheduler}.sock")
        transfer = await TransferClient.start(STAGING, socket_path)
        stack.push_async_callback(transfer.close)
        served = ServedModel(demo_model.ensure(MODEL), "bench", arguments)
        engine = VllmEngine(served, socket_path, scheduler=scheduler)
        stack.push_async_callback(engine.stop)
        info = await engine.start()
        await warm_up(engine, info)
        await transfer.configure(info.layout.fingerprint())
        engine.set_step_targets(StepTargets.of(StepsConfig(), SLO.itl_s))
        streams = Streams(engine)
        reading = asyncio.create_task(streams.run())
        try:
            yield streams
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def row(scheduler: Scheduler, rate: float, seed: str, answers: list[Answer]) -> dict[str, Any]:
    """Returns the figures of one run."""
    found = mixed_load.summary(answers, SLO)
    names = ("short_ttft_p50_ms", "short_ttft_p90_ms", "long_ttft_p50_ms", "long_ttft_p90_ms")
    rounded = {name: round(found[name], 1) for name in (*names, "itl_p50_ms", "itl_p99_ms")}
    met = round(found["met_share"], 3)
    return {"scheduler": scheduler, "rate": rate, "seed": seed, **rounded, "met_share": met}


async def measure(
    schedulers: list[Scheduler],
    rates: list[float],
    num_requests: int,
    seeds: list[str],
    directory: Path,
) -> None:
    """Prints one line of JSON per run."""
    arguments = systems.engine_args(MODEL, 64, enable_prefix_caching=False)
    arguments["max_num_batched_tokens"] = 2048
    for scheduler in schedulers:
        async with running(scheduler, arguments, directory) as streams:
            await mixed_load.open_loop(
                streams.send, mixed_load.arrivals("uncounted", 4.0, NUM_UNCOUNTED)
            )
            for rate in rates:
                for seed in seeds:
                    await asyncio.sleep(SPIN_S)
                    load = mixed_load.arrivals(seed, rate, num_requests)
                    answers = await mixed_load.open_loop(streams.send, load)
                    print(json.dumps(row(scheduler, rate, seed, answers)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0, 1.8], help="Requests/s.")
    parser.add_argument(
        "--schedulers", nargs="+", choices=SCHEDULERS, default=SCHEDULERS, help="In this order."
    )
    parser.add_argument("--requests", type=int, default=60, help="Requests of one run.")
    parser.add_argument("--seeds", nargs="+", default=["1"], help="Seeds of the requests.")
    parser.add_argument("--core", default="0", help="Core of the engine.")
    given = parser.parse_args()
    os.environ[VLLM_BIND_THREADS] = given.core
    # vLLM keeps the first engine's directory for the temporary files of later ones.
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(
            measure(given.schedulers, given.rates, given.requests, given.seeds, Path(directory))
        )


if __name__ == "__main__":
    main()
