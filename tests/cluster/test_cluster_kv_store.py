"""Conversations whose KV blocks are evicted between turns, with and without host memory."""

from __future__ import annotations

import asyncio
import signal

import pytest

from baton.client import AdminClient, BatonClient

BLOCK = 16
# Prefix caches of 1,536 tokens.
SIMULATED = {"kv_tokens": 1536, "max_model_len": 1024, "max_num_batched_tokens": 1024}
ON, OFF = {"host_bytes": 2**24}, {"host_bytes": 0}
TURN, ANSWER = 120, 40
SOON_S = 120.0


async def converse(cluster, client, admin, prompt):
    """Sends one turn of a conversation.

    Returns:
        The answer's tokens, the worker that has all of the conversation, and the prompt's sources.
    """
    async with asyncio.timeout(SOON_S):
        done = await client.complete(prompt, max_tokens=ANSWER, ignore_eos=True)
    assert done.token_ids == cluster.expected(prompt, ANSWER)
    info = await admin.get_request(done.request_id)
    sources = info.prompt_sources
    cached = sources.device + sources.host + sources.fetched
    assert cached + sources.computed == len(prompt)
    assert done.usage.cached_prompt_tokens == cached
    return done.token_ids, info.decode_worker_id or info.prefill_worker_id, sources


async def evict(cluster, client, begin):
    """Fills both prefix caches with other prompts."""
    prompts = [[begin + number, *range(5, 400), *range(5, 305)] for number in range(8)]
    answers = await asyncio.gather(
        *(client.complete(prompt, max_tokens=2, ignore_eos=True) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == cluster.expected(prompt, 2)


async def serving(new_cluster, kv_store):
    cluster = new_cluster("p1", "d1", simulated=SIMULATED, kv_store=kv_store)
    await cluster.serving()
    return cluster


@pytest.mark.parametrize("kv_store", [ON, OFF], ids=["on", "off"])
async def test_no_turn_computes_what_an_earlier_one_computed(new_cluster, kv_store):
    cluster = await serving(new_cluster, kv_store)
    prompt, num_host = list(range(200, 200 + TURN)), 0
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        for turn in range(4):
            answer, _, sources = await converse(cluster, client, admin, prompt)
            if turn and kv_store is ON:
                # New are the text of this turn, the last block of the one before, and the last
                # token of the answer, which was never computed.
                assert sources.computed <= TURN + 2 * BLOCK
            if turn and kv_store is OFF:
                assert sources.host == 0
                assert sources.computed > TURN + 2 * BLOCK
            num_host += sources.host
            prompt = [*prompt, *answer, *range(300 + turn, 300 + turn + TURN)]
            await evict(cluster, client, 10 + 10 * turn)
    assert (num_host > 0) == (kv_store is ON)
    await cluster.nothing_left()


async def test_a_turn_is_computed_again_when_its_holder_was_killed(new_cluster):
    cluster = await serving(new_cluster, ON)
    prompt = list(range(60, 60 + 3 * TURN))
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        answer, holder, _ = await converse(cluster, client, admin, prompt)
        await evict(cluster, client, 10)
        cluster.signal(holder, signal.SIGKILL)
        assert await cluster.exit_code(holder) == -signal.SIGKILL
        prompt = [*prompt, *answer, 5, 6, 7]
        answer, other, sources = await converse(cluster, client, admin, prompt)
        assert other != holder
        assert sources.computed >= ANSWER
        # The worker that computed it keeps it now.
        await evict(cluster, client, 40)
        _, again, sources = await converse(cluster, client, admin, [*prompt, *answer, 8])
        assert again == other
        assert sources.computed <= 2 * BLOCK
    await cluster.nothing_left(dead=(holder,))
