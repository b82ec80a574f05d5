"""A prefill and a decode engine of several ranks each, with everything that tests run on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil

from baton.runtime.process import affinity
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_cases import HOST_BYTES, NUM_FETCH_TOKENS, WAYS, unequal
from tests.vllm.engine_failures import failures
from tests.vllm.engine_fetches import fetch, fetches
from tests.vllm.engine_handoffs import (
    ENGINE_ARGS,
    TIMEOUT_S,
    Side,
    hand_over,
    handed_over,
    left_behind,
    side,
)
from tests.vllm.engine_host_tier import ask, host_tier
from tests.vllm.engine_recoveries import continued
from tests.vllm.engine_wrong_requests import wrong_requests
from tests.vllm.forked_engines import fork_engines, has_started


def shared_segments() -> list[str]:
    """Returns the shared memory that the engines' processes map by name."""
    mapped, group = set[str](), os.getpgid(0)
    for process in psutil.process_iter():
        # Processes of other tests may end meanwhile.
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                mapped |= {entry.path for entry in process.memory_maps()}
    return sorted(path for path in mapped if path.startswith("/dev/shm/"))


async def an_engine_loads() -> None:
    """Waits for an engine core. vLLM configures only one engine at a time before that."""
    assert await asyncio.to_thread(has_started.wait, TIMEOUT_S)


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
        made["continued"] = await continued(prefill)
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
    fork_engines()
    return asyncio.run(run(model, ranks, given))
