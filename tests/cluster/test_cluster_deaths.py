"""Workers that die, are stopped or leave while they have requests."""

import asyncio
import signal

import pytest

from baton.client import AdminClient, BatonClient, Tokens
from baton.client.errors import UnavailableError

PROMPT = list(range(5, 305))
DECODING = {"simulated": {"step_base_ms": 20}}
# Before a worker whose stream broke is given up.
DYING = {**DECODING, "coordinator": {"worker_timeout_s": 3}}


async def decoding(client, **options):
    """A request whose tokens flow from the decode worker."""
    stream = client.generate(PROMPT, **options)
    num_tokens = 0
    async for event in stream:
        if isinstance(event, Tokens):
            num_tokens += len(event.token_ids)
            if num_tokens >= 3:
                return stream
    raise AssertionError("ended early")


@pytest.mark.parametrize("victim", ["p1", "d1"])
async def test_a_killed_worker_fails_its_requests_and_nothing_is_left(new_cluster, victim):
    over = {"step_base_ms": 20}
    if victim == "p1":
        over["prefill_per_token_ms"] = 20
    cluster = new_cluster("p1", "d1", **DYING | {"simulated": over})
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        if victim == "d1":
            stream = await decoding(client, max_tokens=900)
        else:
            stream = client.generate(PROMPT, max_tokens=900)
            await anext(stream)
        children = cluster.process(victim).children(recursive=True)
        cluster.signal(victim, signal.SIGKILL)
        with pytest.raises(UnavailableError, match=victim):
            async with asyncio.timeout(10):
                await stream.complete()
        assert await cluster.exit_code(victim) == -signal.SIGKILL
        await cluster.nothing_left()
        async with asyncio.timeout(10):
            while any(child.is_running() and child.status() != "zombie" for child in children):
                await asyncio.sleep(0.05)
        # Another takes its place.
        cluster.start_worker("prefill" if victim == "p1" else "decode", f"{victim}-again")
        await cluster.serving()
        done = await client.complete([5, 6, 7], max_tokens=5, timeout_s=20)
        assert done.token_ids == cluster.expected([5, 6, 7], 5)
    await cluster.nothing_left()


async def test_a_worker_that_stands_still_is_lost_and_fenced(new_cluster):
    cluster = new_cluster("p1", "d1", **DECODING, coordinator={"worker_timeout_s": 1.0})
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        stream = await decoding(client, max_tokens=900)
        cluster.signal("d1", signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="d1"):
            async with asyncio.timeout(10):
                await stream.complete()
        cluster.signal("d1", signal.SIGCONT)
        assert await cluster.exit_code("d1") == 1
        assert "fenced" in cluster.stderr("d1").splitlines()[-1]
    await cluster.nothing_left()


@pytest.mark.parametrize("leaver", ["p1", "d1"])
async def test_a_worker_told_to_stop_finishes_first(new_cluster, leaver):
    cluster = new_cluster("p1", "d1", **DYING)
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        streams = [await decoding(client, max_tokens=40) for _ in range(3)]
        late = [client.generate([8, salt], max_tokens=20) for salt in range(5, 10)]
        for stream in late:
            await anext(stream)
        cluster.signal(leaver, signal.SIGTERM)
        for stream in streams:
            await stream.complete()
            assert stream.token_ids == cluster.expected(PROMPT, 40)
        for salt, stream in enumerate(late, start=5):
            # Dispatched when they were accepted, before the worker said that it leaves.
            await stream.complete()
            assert stream.token_ids == cluster.expected([8, salt], 20)
        assert await cluster.exit_code(leaver) == 0
        async with AdminClient(cluster.address) as admin:
            left = [worker.worker_id for worker in await admin.list_workers()]
        assert left == ["d1" if leaver == "p1" else "p1"]
    await cluster.nothing_left()


async def test_the_transfer_services_death_ends_its_worker(new_cluster):
    cluster = new_cluster("p1", "d1", **DYING)
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        stream = await decoding(client, max_tokens=900)
        for child in cluster.process("d1").children(recursive=True):
            child.kill()
        with pytest.raises(UnavailableError):
            async with asyncio.timeout(10):
                await stream.complete()
        assert await cluster.exit_code("d1") == 1
        assert "transfer service" in cluster.stderr("d1").splitlines()[-1]
    await cluster.nothing_left()
