"""Long conversations whose KV blocks do not fit into the engines' caches, on two cores.

`python -m baton.bench.conversation --help`. Every system has the same two engines, each on one
core: Baton's prefill and decode worker, with and without the KV store in host memory, and two plain
vLLM servers, with vLLM's prefix caching alone and with vLLM's offloading to the same host memory.
Several conversations with one shared beginning take turns, one request at a time, so that each
finds its own blocks evicted. A plain server gets every turn of its conversations.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal, TypeAlias, get_args

import aiohttp

from baton.bench import interrupts, streams, systems
from baton.bench.streams import Timed
from baton.client.client import BatonClient
from baton.kvtransfer.connector.tiers.host_tier import host_options
from baton.runtime import demo_model

MODEL = "demo-88m"
# An engine's cache holds less than two conversations, and host memory holds all of them.
CACHE_BYTES, HOST_BYTES = 64 * 2**20, 512 * 2**20

System = Literal["baton", "baton without host memory", "plain", "plain with offloading"]
SYSTEMS: tuple[System, ...] = get_args(System)
# Sends one prompt of a conversation, given by its number, and returns the answer.
Turn: TypeAlias = Callable[[int, list[int]], Awaitable[Timed]]


@contextlib.asynccontextmanager
async def plain(
    arguments: dict[str, Any], cores: tuple[str, str], num_outputs: int, *, offloads: bool
) -> AsyncIterator[Turn]:
    arguments = {**arguments, "enable_prompt_tokens_details": True}
    if offloads:
        extra = {
            **host_options(HOST_BYTES, {}),
            # vLLM's own store works only with GPUs.
            "spec_name": "HostMemory",
            "spec_module_path": "baton.kvtransfer.connector.tiers.host_memory",
        }
        arguments["kv_transfer_config"] = json.dumps(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        )
    timeout = aiohttp.ClientTimeout(total=streams.REQUEST_TIMEOUT_S)
    with systems.plain_pair(demo_model.ensure(MODEL), arguments, cores) as servers:
        async with aiohttp.ClientSession(timeout=timeout) as http:

            async def send(number: int, prompt: list[int]) -> Timed:
                server = servers[number % len(servers)]
                return await streams.through_vllm(
                    http,
                    server.address,
                    prompt,
                    num_outputs,
                    stream_options={"include_usage": True},
                )

            yield send


@contextlib.asynccontextmanager
async def baton(
    arguments: dict[str, Any], cores: tuple[str, str], num_outputs: int, *, host_bytes: int
) -> AsyncIterator[Turn]:
    settings = {"kv_store": {"host_bytes": host_bytes}}
    with systems.baton(demo_model.ensure(MODEL), arguments, cores, settings) as cluster:
        async with BatonClient(cluster.coordinator.address) as client:
            await cluster.wait_ready(client)

            async def send(number: int, prompt: list[int]) -> Timed:
                return await streams.through_baton(
                    client, prompt, num_outputs, session_id=f"conversation-{number}"
                )

            yield send


def opened(
    system: System, arguments: dict[str, Any], cores: tuple[str, str], num_outputs: int
) -> contextlib.AbstractAsyncContextManager[Turn]:
    if system.startswith("plain"):
        offloads = system == "plain with offloading"
        return plain(arguments, cores, num_outputs, offloads=offloads)
    host_bytes = HOST_BYTES if system == "baton" else 0
    return baton(arguments, cores, num_outputs, host_bytes=host_bytes)


async def converse(send: Turn, given: argparse.Namespace, seed: str) -> list[list[Timed]]:
    """Returns the answers of each turn, over all conversations."""
    source = random.Random(seed)
    vocab_size = demo_model.SHAPES[MODEL].vocab_size

    def words(count: int) -> list[int]:
        return [source.randrange(16, vocab_size) for _ in range(count)]

    shared = words(given.shared)
    histories = [list(shared) for _ in range(given.conversations)]
    turns = []
    for _ in range(given.turns):
        turns.append(list[Timed]())
        for number, history in enumerate(histories):
            history += words(given.new)
            answer = await send(number, list(history))
            answer.num_prompt_tokens = len(history)
            history += answer.token_ids
            turns[-1].append(answer)
    return turns


def row(system: System, turns: list[list[Timed]], given: argparse.Namespace) -> dict[str, Any]:
    """Returns the figures of one run."""

    def ttft_ms(first: int, last: int) -> float:
        found = [one.ttft_s * 1e3 for turn in turns[first - 1 : last] for one in turn]
        return round(statistics.median(found), 1)

    early, late = ttft_ms(2, 4), ttft_ms(given.turns - 2, given.turns)
    later = [one for turn in turns[1:] for one in turn]
    computed = [one.num_prompt_tokens - one.num_cached_tokens for one in later]
    cached = sum(one.num_cached_tokens for one in later)
    gaps = sorted(gap * 1e3 for one in later for gap in one.gaps_s)
    return {
        "system": system,
        "ttft_turns_2_to_4_p50_ms": early,
        "ttft_last_3_turns_p50_ms": late,
        "ratio": round(late / early, 2),
        "computed_per_turn_p50": statistics.median(computed),
        "computed_per_turn_max": max(computed),
        "cached_share": round(cached / sum(one.num_prompt_tokens for one in later), 3),
        "itl_p50_ms": round(statistics.median(gaps), 1),
    }


async def measure(given: argparse.Namespace) -> None:
    """Prints one line of JSON per run."""
    arguments = systems.engine_args(MODEL, 16, kv_cache_memory_bytes=CACHE_BYTES)
    cores = sorted(os.sched_getaffinity(0))
    pair = str(cores[0]), str(cores[1 % len(cores)])
    for system in given.systems:
        async with opened(system, arguments, pair, given.outputs) as send:
            # Each step size is compiled or measured before the counted turns.
            for number in range(2):
                await send(number, list(range(100 + number, 100 + number + given.new)))
            for seed in given.seeds:
                turns = await converse(send, given, seed)
                print(json.dumps({"seed": seed, **row(system, turns, given)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--turns", type=int, default=30, help="Turns of each conversation.")
    parser.add_argument("--conversations", type=int, default=6, help="Number of conversations.")
    parser.add_argument("--shared", type=int, default=128, help="Tokens of the shared beginning.")
    parser.add_argument("--new", type=int, default=64, help="New tokens of each turn.")
    parser.add_argument("--outputs", type=int, default=32, help="Tokens of each answer.")
    parser.add_argument("--seeds", nargs="+", default=["1"], help="Seeds of the conversations.")
    given = parser.parse_args()
    interrupts.on_sigterm()
    asyncio.run(measure(given))


if __name__ == "__main__":
    main()
