"""A prefill and a decode engine of several ranks each, with everything that tests run on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import vllm_cases as cases
from engine_cases import HOST_BYTES, NUM_FETCH_TOKENS, WAYS, unequal
from engine_failures import failures
from engine_fetches import fetch, fetches
from engine_handoffs import (
    ENGINE_ARGS,
    TIMEOUT_S,
    Side,
    hand_over,
    handed_over,
    left_behind,
    side,
)
from engine_host_tier import ask, host_tier
from engine_wrong_requests import wrong_requests

from baton.runtime import affinity


def shared_segments() -> list[str]:
    """Returns the shared memory that the engines' processes map by name."""
    children = psutil.Process().children(recursive=True)
    mapped = {entry.path for child in children for entry in child.memory_maps()}
    return sorted(path for path in mapped if path.startswith("/dev/shm/"))


async def an_engine_loads() -> None:
    """Waits for an engine core. vLLM configures only one engine at a time before that."""
    async with asyncio.timeout(TIMEOUT_S):
        while not any("spawn_main" in " ".join(command) for command in commands_of_children()):
            await asyncio.sleep(0.05)


def commands_of_children() -> Iterator[list[str]]:
    for child in psutil.Process().children():
        # vLLM also starts short-lived processes to inspect the machine.
        with contextlib.suppress(psutil.NoSuchProcess):
            yield child.cmdline()


async def unequal_ranks(one: Side, two: Side) -> dict[str, Any]:
    """Engines of one and of two ranks hand over to each other, and fetch from each other."""
    pairs, fetched = {"1 to 2": (one, two), "2 to 1": (two, one)}, {}
    async with asyncio.timeout(TIMEOUT_S):
        results = [await hand_over(*pairs[way], case) for way in WAYS for case in unequal(way)]
        for number, (way, (holder, reader)) in enumerate(pairs.items()):
            turn = cases.prompt(NUM_FETCH_TOKENS + 60, 401 + number)
            await ask(holder, f"{way}, turn", turn[:NUM_FETCH_TOKENS])
            made = await fetch(holder, reader, f"{way}, fetched", turn)
            answer = await ask(holder, f"{way}, answer", turn)
            fetched[way] = {**made, "answer": answer["tokens"]}
        left = await left_behind(one, two)
    return {"results": results, "fetched": fetched, "left": left}


async def run(model: str, ranks: int, given: dict[str, Any]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        async with asyncio.TaskGroup() as group:
            sides = []
            for name in ("p.sock", "d.sock"):
                begun = stack.enter_async_context(
                    side(model, ranks, str(directory / name), host_bytes=HOST_BYTES)
                )
                sides.append(group.create_task(begun))
                await an_engine_loads()
        prefill, decode = (each.result() for each in sides)
        made = await handed_over(prefill, decode, given)
        made["host tier"] = await host_tier(prefill, decode)
        made["fetches"] = await fetches(prefill, decode, directory)
        made["wrong requests"] = await wrong_requests(prefill)
        made["left"] += await left_behind(prefill, decode)
        # The cores of the other engines' ranks must not bind this engine's.
        os.environ.pop(affinity.VLLM_BIND_THREADS, None)
        # Its rank holds twice the heads.
        memory = {"kv_cache_memory_bytes": 2 * ENGINE_ARGS["kv_cache_memory_bytes"]}
        single = await stack.enter_async_context(
            side(model, 1, str(directory / "1.sock"), **memory)
        )
        made["unequal"] = await unequal_ranks(single, prefill)
        made["segments"] = shared_segments()
        # This comes last because it ends the decode engine.
        made["failures"] = await failures(decode)
    return made


def main(model: str, ranks: int, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the results of the cases."""
    return asyncio.run(run(model, ranks, given))
