"""Compares the simulator with a live cluster on vLLM on this machine's CPU.

`make bench`, or `python -m baton.bench.agreement --help`. One prefill and one decode worker get a
Poisson load. The benchmark then reads the measured step times from the coordinator (as shown by
`baton workers --json`) and simulates the same requests at the same times with these step times.
Nothing else is fitted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.bench import interrupts, systems
from baton.client import AdminClient, BatonClient
from baton.load import stats
from baton.load.figures import Result
from baton.load.generator import Generator
from baton.load.lengths import Lengths
from baton.load.measured import Slo
from baton.load.plan import LaneRule, Planned, arrival_times, generated
from baton.load.prompts import Prompts
from baton.load.results import PERCENTS
from baton.load.stats import Goal
from baton.load.traces import Arrival
from baton.runtime import demo_model
from baton.runtime.config import parse
from baton.simulator.measured import step_costs
from baton.simulator.report import Figures
from baton.simulator.run import simulate
from baton.v1 import admin_pb2, common_pb2

MODEL = "demo-88m"
# Eager mode starts the workers sooner; the speed of their steps does not matter here.
ENGINE_ARGS = systems.engine_args(
    MODEL, max_num_seqs=64, enable_prefix_caching=False, enforce_eager=True
)
# In both clusters the prefill worker computes every prompt.
SETTINGS = {"decode": {"local_prefill": False}}
# Vocabulary size of the demo tokenizer; the model's embedding table is larger.
VOCAB_SIZE = 430
REQUEST_TIMEOUT_S = 120.0
MAX_DEVIATION = 0.15
NAMES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


@dataclass(frozen=True, slots=True)
class Live:
    """The result of the live run, and the coordinator's description of the prefill worker."""

    result: Result
    worker: admin_pb2.WorkerInfo


def plan(rate: float, seconds: float, seed: int) -> list[Planned]:
    """Returns Poisson arrivals with mixed prompt and output lengths."""
    chance = random.Random(f"times {seed}")
    times = itertools.takewhile(lambda at: at < seconds, arrival_times(rate, 1.0, chance))
    lengths = Lengths.parse("64-900", "prompts"), Lengths.parse("16-96", "outputs")
    return list(generated(times, *lengths, LaneRule(), seed))


async def live(arguments: argparse.Namespace, requests: list[Planned]) -> Live:
    model = demo_model.ensure(MODEL)
    cores = sorted(os.sched_getaffinity(0))
    pair_cores = str(cores[0]), str(cores[1 % len(cores)])
    with systems.baton(model, ENGINE_ARGS, pair_cores, SETTINGS) as cluster:
        address = cluster.coordinator.address
        async with BatonClient(address) as client:
            await cluster.wait_ready(client)
            prompts = Prompts(VOCAB_SIZE, arguments.seed)
            for what, load in (
                ("warm-up", plan(arguments.rate, arguments.warm_up_s, arguments.seed + 1)),
                ("run", requests),
            ):
                generator = Generator(client, prompts, Slo(), timeout_s=REQUEST_TIMEOUT_S)
                began = time.monotonic()
                outcome = await generator.open_loop(load, 4096, asyncio.Event())
                spent_s = time.monotonic() - began
                print(f"{what}: {len(load)} requests in {spent_s:.0f} s", file=sys.stderr)
        async with AdminClient(address) as admin:
            workers = await admin.list_workers()
    result = Result.of("bench", {"rate": arguments.rate}, Slo(), outcome, is_open=True)
    return Live(result, next(one for one in workers if one.role == common_pb2.ROLE_PREFILL))


def replay(worker: admin_pb2.WorkerInfo, requests: list[Planned]) -> Figures:
    """Simulates the same requests with workers that have the measured step times."""
    config = parse(
        {
            "model": "simulated",
            "engine": "simulated",
            "simulated": {
                **step_costs(worker.latency),
                "max_model_len": ENGINE_ARGS["max_model_len"],
                "max_num_batched_tokens": ENGINE_ARGS["max_num_batched_tokens"],
                "max_num_seqs": ENGINE_ARGS["max_num_seqs"],
                "block_size_tokens": ENGINE_ARGS["block_size"],
                "kv_tokens": worker.load.kv_tokens_total,
                "prefix_caching": False,
            },
            **SETTINGS,
        },
        "agreement",
    )
    arrivals = [Arrival(one.at_s, one.num_prompt_tokens, one.num_output_tokens) for one in requests]
    return simulate(config, arrivals, "static").figures


def goals(seen: Result, found: Figures) -> Iterator[Goal]:
    for name in ("ttft_ms", "itl_ms"):
        real, simulated = (getattr(one, name)[50] for one in (seen.total, found))
        what = f"{NAMES[name]} p50: deviation of simulated / live from 1"
        yield Goal(what, abs(stats.ratio(simulated, real) - 1), MAX_DEVIATION)


def show(seen: Live, found: Figures) -> None:
    latency = seen.worker.latency
    total = seen.result.total
    rows = []
    for name, title in NAMES.items():
        real, simulated = getattr(total, name), getattr(found, name)
        rows += [
            [
                f"{title} p{percent}",
                f"{real[percent]:.1f}",
                f"{simulated[percent]:.1f}",
                f"{stats.ratio(simulated[percent], real[percent]):.2f}",
            ]
            for percent in PERCENTS
        ]
    print(
        f"fitted to {latency.num_samples} steps: a prompt of n tokens "
        f"{latency.prefill_base_ms:.3g} + {latency.prefill_per_token_ms:.3g} n "
        f"+ {latency.prefill_per_token_squared_ms:.3g} n^2 ms, a step of n requests and "
        f"k tokens {latency.step_base_ms:.3g} + {latency.step_per_request_ms:.3g} n "
        f"+ {latency.step_per_kv_token_ms:.3g} k ms"
    )
    title = f"{total.num_requests} requests, failed {total.num_failed} and {found.num_failed}; ms"
    stats.print_table(title, ["", "live", "simulated", "ratio"], rows)
    stats.print_goals(list(goals(seen.result, found)))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s")
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the run")
    parser.add_argument("--warm-up-s", type=float, default=20.0, help="load before the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path("bench/results/agreement.json"))
    arguments = parser.parse_args()
    for name in ("rate", "seconds", "warm_up_s"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name.replace('_', '-')}: must be more than 0")
    return arguments


def as_json(seen: Live, found: Figures) -> dict[str, Any]:
    names = seen.worker.latency.DESCRIPTOR.fields_by_name
    return {
        "live": seen.result.as_json(),
        "simulated": {"kind": "simulate", **asdict(found)},
        "latency": {name: getattr(seen.worker.latency, name) for name in names},
        "reaches": [asdict(one) | {"reached": one.reached} for one in goals(seen.result, found)],
    }


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    requests = plan(arguments.rate, arguments.seconds, arguments.seed)
    seen = asyncio.run(live(arguments, requests))
    found = replay(seen.worker, requests)
    stats.save(as_json(seen, found), arguments.json)
    show(seen, found)
    print(f"engines in {ENGINE_ARGS['dtype']}; figures in {arguments.json}")


if __name__ == "__main__":
    main()
