"""Workers fetch what other workers have computed, whatever happens to those workers."""

from __future__ import annotations

import asyncio
import signal

import pytest

from baton.client import AdminClient, BatonClient

# A prompt token takes 2 ms, so that a fetch pays for a few blocks.
SIMULATED = {
    "prefill_per_token_ms": 2.0,
    "step_base_ms": 1.0,
    "max_model_len": 4096,
    "kv_tokens": 16384,
    "mean_output_tokens": 0,
}
# The pools are strict and decode workers compute no prompts, so an answer's blocks are only on the
# worker that decoded it.
STRICT = {
    "simulated": SIMULATED,
    "elastic": False,
    "decode": {"local_prefill": False},
}
TURN, ANSWER, BLOCK = 60, 120, 16
SOON_S = 120.0


class Conversation:
    """One conversation, and the sources of its latest prompt."""

    def __init__(self, cluster, client, admin):
        self._cluster, self._client, self._admin = cluster, client, admin
        self.prompt = list(range(60, 60 + TURN))

    async def turn(self):
        """Sends a turn, whose answer must be right; returns what `baton explain` knows of it."""
        async with asyncio.timeout(SOON_S):
            done = await self._client.complete(self.prompt, max_tokens=ANSWER, ignore_eos=True)
        assert done.token_ids == self._cluster.expected(self.prompt, ANSWER)
        info = await self._admin.get_request(done.request_id)
        sources = info.prompt_sources
        cached = sources.device + sources.host + sources.fetched
        assert cached + sources.computed == len(self.prompt)
        if info.attempt == 1:
            # The sources are those of the latest attempt, and the usage is that of the first.
            assert done.usage.cached_prompt_tokens == cached
        first = len(self.prompt)
        self.prompt = [*self.prompt, *done.token_ids, *range(first % 200, first % 200 + TURN)]
        return info


async def test_the_prefill_worker_fetches_the_answers_from_the_decode_worker(new_cluster):
    # A fetch is predicted by the measured speed of handoffs, and gets as long as the computation
    # takes that it saves: on a busy machine, either may be seconds.
    cost = {"prefill_per_token_ms": 40.0}
    slow = {**STRICT, "simulated": SIMULATED | cost, "latency": cost}
    cluster = new_cluster("p1", "d1", **slow)
    await cluster.serving()
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        conversation = Conversation(cluster, client, admin)
        await conversation.turn()
        for _ in range(3):
            # The workers have reported their blocks by then.
            await cluster.nothing_left()
            info = await conversation.turn()
            sources = info.prompt_sources
            # New are the text of this turn and the last block of the one before.
            assert sources.computed <= TURN + 2 * BLOCK, info
            assert sources.fetched >= ANSWER - 2 * BLOCK
            assert info.placement.fetched_from == "d1"
            assert info.placement.fetched_tokens == sources.fetched
    await cluster.nothing_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["holder", "reader"])
async def test_a_turn_survives_the_end_of_a_worker(new_cluster, victim, number):
    coordinator = {"worker_silent_s": 2.0, "worker_timeout_s": 60.0}
    workers = ("p1", "d1", "d2") if victim == "holder" else ("p1", "p2", "d1")
    cluster = new_cluster(*workers, **STRICT, coordinator=coordinator)
    await cluster.serving(3)
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        conversation = Conversation(cluster, client, admin)
        first = await conversation.turn()
        name = first.decode_worker_id if victim == "holder" else first.prefill_worker_id
        next_turn = asyncio.create_task(conversation.turn())
        # The coordinator may not know it yet when it names the worker.
        await asyncio.sleep(0)
        cluster.signal(name, number)
        await next_turn
        if number == signal.SIGSTOP:
            cluster.signal(name, signal.SIGCONT)
        await conversation.turn()
    dead = (name,) if number == signal.SIGKILL else ()
    await cluster.nothing_left(dead=dead)


async def test_a_holder_that_drains_is_not_asked(new_cluster):
    cluster = new_cluster("p1", "d1", "d2", **STRICT)
    await cluster.serving(3)
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        conversation = Conversation(cluster, client, admin)
        holder = (await conversation.turn()).decode_worker_id
        await admin.drain_worker(holder)
        info = await conversation.turn()
        assert info.placement.fetched_from != holder
        assert info.prompt_sources.computed >= ANSWER - BLOCK
    await cluster.nothing_left(dead=(holder,))


async def test_fetching_can_be_turned_off(new_cluster):
    cluster = new_cluster("p1", "d1", **STRICT, kv_store={"fetch": False})
    await cluster.serving()
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        conversation = Conversation(cluster, client, admin)
        await conversation.turn()
        info = await conversation.turn()
        assert info.prompt_sources.fetched == 0
        assert info.prompt_sources.computed >= ANSWER
    await cluster.nothing_left()
