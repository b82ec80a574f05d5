"""Measures the cost of disaggregation: Baton, plain vLLM servers, vLLM's NixlConnector.

`make bench`, or `python -m baton.bench.disaggregation --help`. Each engine has one core. Baton and
plain vLLM answer the same prompts in alternating rounds, so that noise of the machine affects both.
"Baton" hands every prompt over. "Baton, elastic" has the default settings: while it is idle, one
worker computes the prompt and decodes. Plain vLLM is one server, and, for several requests in
flight, also two servers behind a balancer (colocated serving with as many engines as Baton). The
NIXL pair runs alone afterwards, because NIXL's progress threads spin.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from baton.bench import interrupts, nixl_transfer, streams, systems
from baton.bench.disaggregation_report import (
    BATON,
    ELASTIC,
    FRESH_REQUESTS,
    NIXL,
    PLAIN,
    PLAIN_PAIR,
    Cell,
    Fresh,
    Results,
    as_json,
    show,
)
from baton.bench.streams import Prompt, Send, Timed
from baton.client.client import BatonClient
from baton.load import stats
from baton.runtime import demo_model

MODEL = "demo-88m"
MAX_MODEL_LEN = demo_model.SHAPES[MODEL].max_model_len
MAX_NUM_SEQS = 16
ENGINE_ARGS = systems.engine_args(MODEL, MAX_NUM_SEQS)
# Every request of a pair with these settings has a handoff; without them, the cell is elastic.
HANDS_OVER = {"decode": {"local_prefill": False}}
# Token IDs of the demo tokenizer without special tokens.
TOKEN_IDS = range(5, 430)
# Counted requests of one system per round, and smallest number of uncounted requests before them.
ROUND = 12
WARM_UP_REQUESTS = 2
# A vLLM rank spins for a second after its last step; the next round begins after that.
SPIN_S = 1.5


def fresh_prompt(source: random.Random, length: int) -> Prompt:
    """Returns a random prompt; prompts do not repeat, so prefix caches have no effect."""
    return source.choices(TOKEN_IDS, k=length)


async def fill(cell: Cell, senders: Mapping[str, Send], repeats: int) -> None:
    """Sends every system the same prompts in rounds and adds the answers to the cell.

    Uncounted prompts before and after the counted ones keep the concurrency constant.
    """
    started = time.monotonic()
    before, after = max(WARM_UP_REQUESTS, cell.concurrency), cell.concurrency - 1
    source = random.Random(cell.name)
    prompts = [fresh_prompt(source, cell.prompt_tokens) for _ in range(repeats)]
    fillers = random.Random(f"around {cell.name} {sorted(senders)}")
    for done in range(0, repeats, ROUND):
        counted = prompts[done : done + ROUND]
        for name, send in senders.items():
            await asyncio.sleep(SPIN_S)
            around = [fresh_prompt(fillers, cell.prompt_tokens) for _ in range(before + after)]
            turn = [*around[:before], *counted, *around[before:]]
            answers = await streams.closed_loop(send, turn, cell.concurrency)
            cell.timed.setdefault(name, []).extend(answers[before : before + len(counted)])
    spent_s = time.monotonic() - started
    progress(f"{cell.name}: {', '.join(senders)}: {repeats} requests each in {spent_s:.0f} s")


async def measure_fresh(system: str, send: Send, length: int, index: int = 0) -> Fresh:
    """Sends the first requests to a system without any warm-up, one at a time."""
    source = random.Random(f"fresh {system} {index}")
    first, *later = [await send(fresh_prompt(source, length)) for _ in range(FRESH_REQUESTS)]
    progress(f"fresh {system}: {FRESH_REQUESTS} requests")
    return Fresh(system, first, later)


async def run(arguments: argparse.Namespace) -> Results:
    model = demo_model.ensure(MODEL)
    cores = sorted(os.sched_getaffinity(0))
    pair_cores = str(cores[0]), str(cores[1 % len(cores)])
    lengths, max_tokens = sorted(arguments.prompt_tokens), arguments.output_tokens
    results = Results(
        output_tokens=max_tokens,
        fresh_tokens=lengths[len(lengths) // 2],
        cells=[Cell(length, one) for length in lengths for one in sorted(arguments.concurrency)],
    )
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        with systems.plain_pair(model, ENGINE_ARGS, pair_cores) as servers:
            plain = servers[0]
            senders_plain = [plain_sender(http, server, max_tokens) for server in servers]
            send_plain, send_pair = senders_plain[0], streams.least_loaded(senders_plain)
            results.fresh.append(await measure_fresh(PLAIN, send_plain, results.fresh_tokens))
            for index in range(arguments.fresh_pairs):
                strict = baton(model, pair_cores, max_tokens, HANDS_OVER)
                async with strict as (cluster, sender):
                    fresh = await measure_fresh(BATON, sender, results.fresh_tokens, index)
                    results.fresh.append(fresh)
                    if index < arguments.fresh_pairs - 1:
                        continue
                    async with baton(model, pair_cores, max_tokens, {}) as (_, send_elastic):
                        for cell in results.cells:
                            senders: dict[str, Send] = {
                                PLAIN: send_plain,
                                BATON: sender,
                                ELASTIC: send_elastic,
                            }
                            if cell.concurrency > 1:
                                senders[PLAIN_PAIR] = send_pair
                            await fill(cell, senders, arguments.repeats)
                    results.resident_mb = resident_mb(cluster, plain)
                    results.handoff_counters = await asyncio.to_thread(cluster.handoff_counters)
                    results.num_sent = sender.num_sent
        if arguments.nixl:
            await add_nixl(results, http, model, pair_cores, max(1, arguments.repeats // 2))
    return results


def plain_sender(http: aiohttp.ClientSession, server: systems.Process, max_tokens: int) -> Send:
    """Returns a function that sends prompts to one plain vLLM server."""

    async def send(prompt: Prompt) -> Timed:
        return await streams.through_vllm(http, server.address, prompt, max_tokens)

    return send


class CountingSender:
    """Sends prompts to Baton and counts them."""

    def __init__(self, client: BatonClient, max_tokens: int) -> None:
        self._client, self._max_tokens = client, max_tokens
        self.num_sent = 0

    async def __call__(self, prompt: Prompt) -> Timed:
        self.num_sent += 1
        return await streams.through_baton(self._client, prompt, self._max_tokens)


@contextlib.asynccontextmanager
async def baton(
    model: str, cores: tuple[str, str], max_tokens: int, settings: Mapping[str, Any]
) -> AsyncIterator[tuple[systems.Baton, CountingSender]]:
    """Starts a coordinator and a worker pair that have served no request yet."""
    with systems.baton(model, ENGINE_ARGS, cores, settings) as cluster:
        async with BatonClient(cluster.coordinator.address) as client:
            await cluster.wait_ready(client)
            yield cluster, CountingSender(client, max_tokens)


async def add_nixl(
    results: Results,
    http: aiohttp.ClientSession,
    model: str,
    cores: tuple[str, str],
    repeats: int,
) -> None:
    with systems.nixl_pair(model, ENGINE_ARGS, cores) as (prefill, decode):

        async def send(prompt: Prompt) -> Timed:
            return await streams.through_nixl(
                http, prefill.address, decode.address, prompt, results.output_tokens
            )

        results.fresh.append(await measure_fresh(NIXL, send, results.fresh_tokens))
        for cell in results.cells:
            await fill(cell, {NIXL: send}, repeats)


def resident_mb(cluster: systems.Baton, plain: systems.Process) -> dict[str, dict[str, float]]:
    processes = {
        "coordinator": cluster.coordinator,
        "prefill worker": cluster.prefill,
        "decode worker": cluster.decode,
        PLAIN: plain,
    }
    return {
        name: {kind: num_bytes / 1e6 for kind, num_bytes in one.resident_bytes().items()}
        for name, one in processes.items()
    }


def progress(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--output-tokens", type=int, default=32, help="per request; at least 3")
    parser.add_argument(
        "--repeats",
        type=int,
        default=24,
        help="requests per prompt length and concurrency; NIXL gets half of them",
    )
    parser.add_argument(
        "--fresh-pairs",
        type=int,
        default=3,
        help="pairs of Baton started for first requests; the last pair serves all others",
    )
    parser.add_argument("--no-nixl", dest="nixl", action="store_false")
    parser.add_argument("--json", type=Path, default=Path("bench/results/disaggregation.json"))
    arguments = parser.parse_args()
    max_prompt = MAX_MODEL_LEN - arguments.output_tokens
    if arguments.output_tokens < 3:
        parser.error("--output-tokens: must be at least 3, or there is no steady gap")
    if not all(1 <= length <= max_prompt for length in arguments.prompt_tokens):
        parser.error(f"--prompt-tokens: must be from 1 to {max_prompt}, the model's context")
    if not all(1 <= one <= MAX_NUM_SEQS for one in arguments.concurrency):
        parser.error(f"--concurrency: must be from 1 to {MAX_NUM_SEQS}")
    if arguments.repeats < 1:
        parser.error("--repeats: must be at least 1")
    if arguments.fresh_pairs < 1:
        parser.error("--fresh-pairs: must be at least 1")
    if arguments.nixl:
        nixl_transfer.require(parser)
    return arguments


def main() -> None:
    arguments = parsed()
    interrupts.on_sigterm()
    started = time.monotonic()
    results = asyncio.run(run(arguments))
    stats.save(as_json(results, MODEL), arguments.json)
    show(results)
    spent_s = time.monotonic() - started
    print(f"{spent_s:.0f} s; engines in {ENGINE_ARGS['dtype']}; figures in {arguments.json}")


if __name__ == "__main__":
    main()
