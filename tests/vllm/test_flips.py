"""A real vLLM worker changes its role and back, without loading anything and without losing one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import vllm_cases as cases
from vllm_cluster import DECODE, PREFILL, Cluster
from vllm_guests import SOON_S, Guests, next_goes, placed
from worker_parts import family

from baton.client import AdminClient
from baton.client.client import BatonClient
from baton.client.events import Tokens
from baton.client.stream import TokenStream
from baton.v1 import admin_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

# The session's own, and the one that joins it.
PREFILL_ID, DECODE_ID, FLIPPER = "prefill-0", "decode-0", "f2"
LONG = ("killed-greedy", "killed-seeded", "killed-grammar", "outgrow-0", "outgrow-1", "outgrow-2")


@pytest_asyncio.fixture(loop_scope="session")
async def guests(
    cluster: Cluster, model: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guests]:
    guests = Guests(cluster, model, tmp_path_factory.mktemp("flips"))
    try:
        guests.start("prefill", FLIPPER, 0, dialled_at="127.0.0.1")
        await guests.attached(FLIPPER)
        yield guests
    finally:
        await guests.close()


async def flipper(cluster: Cluster) -> admin_pb2.WorkerInfo:
    (found,) = [one for one in await cluster.all_workers() if one.worker_id == FLIPPER]
    return found


async def flip(cluster: Cluster, role: int) -> None:
    async with AdminClient(cluster.address) as admin, asyncio.timeout(SOON_S):
        await admin.flip_worker(FLIPPER, role)
        while (await flipper(cluster)).role != role:
            await asyncio.sleep(0.02)


async def begun(client: BatonClient, case: cases.Case, num_tokens: int) -> TokenStream:
    """A request that has so many tokens."""
    stream = client.generate(case["prompt"], timeout_s=120, **case["sampling"])
    async for event in stream:
        if isinstance(event, Tokens) and len(stream.token_ids) >= num_tokens:
            break
    return stream


async def rest(streams: list[TokenStream]) -> list[list[int]]:
    await asyncio.gather(*(stream.complete() for stream in streams))
    return [list(stream.token_ids) for stream in streams]


async def test_a_worker_flips_under_load_and_back(
    client: BatonClient, cluster: Cluster, guests: Guests, expected: dict[str, cases.Case]
) -> None:
    long = [expected[name] for name in LONG]
    tokens = [case["expected"]["token_ids"] for case in long]
    before, processes = await flipper(cluster), family(guests.main(FLIPPER))

    # 1. With prompts in it, which it finishes: then it decodes, and its tokens are right.
    await next_goes(client, cluster, guests, FLIPPER, DECODE_ID)
    chunked = [expected[f"length-{3 * cases.CHUNK + 5}-{seed}"] for seed in (1, 2)]
    streams = [
        client.generate(case["prompt"], timeout_s=120, **case["sampling"]) for case in chunked
    ]
    for stream in streams:
        # It is accepted, and its prompt is dispatched.
        await anext(stream)
    await flip(cluster, DECODE)
    assert await rest(streams) == [case["expected"]["token_ids"] for case in chunked]
    assert FLIPPER in [(await placed(cluster, stream))[0] for stream in streams]
    for name in ("flip-0", "flip-1"):
        await next_goes(client, cluster, guests, PREFILL_ID, FLIPPER)
        stream = await begun(client, expected[name], 2)
        assert await placed(cluster, stream) == (PREFILL_ID, FLIPPER)
        assert await rest([stream]) == [expected[name]["expected"]["token_ids"]]

    # 2. Back, with outputs in it: those that move elsewhere go on as if nothing had happened.
    streams = list(await asyncio.gather(*(begun(client, case, 3) for case in long)))
    there = [stream for stream in streams if (await placed(cluster, stream))[1] == FLIPPER]
    assert there
    await flip(cluster, PREFILL)
    assert await rest(streams) == tokens

    # 3. It computes prompts again. It is the same process, whose engine never ended.
    await next_goes(client, cluster, guests, FLIPPER, DECODE_ID)
    stream = await begun(client, expected["flip-2"], 2)
    assert await placed(cluster, stream) == (FLIPPER, DECODE_ID)
    assert await rest([stream]) == [expected["flip-2"]["expected"]["token_ids"]]
    after = await flipper(cluster)
    assert (after.incarnation, after.startup_ms) == (before.incarnation, before.startup_ms)
    assert all(process.is_running() for process in processes)
    await cluster.assert_idle()
