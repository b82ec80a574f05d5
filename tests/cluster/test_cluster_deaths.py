"""Workers that are killed, stopped or drained while they have requests."""

import asyncio
import signal

import pytest

from baton.client import AdminClient, BatonClient, Tokens
from baton.client.errors import UnavailableError
from baton.runtime.durations import to_seconds
from baton.v1 import admin_pb2
from tests.vllm.worker_parts import Remains, family, stopped

PROMPT = list(range(5, 305))
# Timeout of a wait in seconds; it only bounds a test that hangs.
SOON_S = 120.0
# Prompts and outputs run on workers of their own.
DECODING = {"elastic": False, "simulated": {"step_base_ms": 20}}
# These times are short, but longer than a process of a busy machine may stay without CPU time.
DYING = {**DECODING, "coordinator": {"worker_silent_s": 1.5, "worker_timeout_s": 4}}
POOLS = {"p": "prefill", "d": "decode"}


async def decoding(client, **options):
    """Starts a request, and returns its stream when the decode worker has sent tokens."""
    stream = client.generate(PROMPT, **options)
    num_tokens = 0
    async for event in stream:
        if isinstance(event, Tokens):
            num_tokens += len(event.token_ids)
            if num_tokens >= 3:
                return stream
    raise AssertionError("ended early")


async def prefilling(client, **options):
    """Starts a request whose prompt is being computed on a slow prefill worker."""
    stream = client.generate(PROMPT, **options)
    await anext(stream)
    return stream


async def worker_of(cluster, stream, pool):
    """Returns the ID of the worker of pool "p" or "d" that has the request."""
    async with AdminClient(cluster.address) as admin:
        request = await admin.get_request(stream.request_id)
    return request.prefill_worker_id if pool == "p" else request.decode_worker_id


async def completed(stream):
    async with asyncio.timeout(SOON_S):
        await stream.complete()
    return stream.token_ids


def sections(pool, **coordinator):
    """Returns configuration sections; prompts take long when a prefill worker will be killed."""
    simulated = {"step_base_ms": 20} | ({"prefill_per_token_ms": 8} if pool == "p" else {})
    timing = {**DYING["coordinator"], **coordinator}
    return {**DYING, "simulated": simulated, "coordinator": timing}


@pytest.mark.parametrize("other", ["beside it", "in its place", "under its name"])
@pytest.mark.parametrize("pool", ["p", "d"])
async def test_a_killed_workers_stream_continues_on_another(new_cluster, pool, other):
    names = ["p1", "d1"] + [f"{pool}2"] * (other == "beside it")
    cluster = new_cluster(*names, **sections(pool))
    await cluster.serving(len(names))
    num_tokens = 12 if pool == "p" else 150
    async with BatonClient(cluster.address) as client:
        stream = await (prefilling if pool == "p" else decoding)(client, max_tokens=num_tokens)
        victim = await worker_of(cluster, stream, pool)
        remains = Remains(cluster.process(victim))
        cluster.signal(victim, signal.SIGKILL)
        assert await cluster.exit_code(victim) == -signal.SIGKILL
        dead = () if other == "under its name" else (victim,)
        if other != "beside it":
            cluster.start_worker(POOLS[pool], f"{victim}-again" if dead else victim)
        assert await completed(stream) == cluster.expected(PROMPT, num_tokens)
        await remains.gone()
        done = await client.complete([5, 6, 7], max_tokens=5, timeout_s=SOON_S)
        assert done.token_ids == cluster.expected([5, 6, 7], 5)
    await cluster.nothing_left(dead=dead)


@pytest.mark.parametrize("pool", ["p", "d"])
async def test_a_killed_workers_stream_fails_in_time_without_another(new_cluster, pool):
    limits = {"max_recovery_s": 0.5}
    cluster = new_cluster("p1", "d1", **sections(pool, **limits))
    await cluster.serving()
    victim = f"{pool}1"
    async with BatonClient(cluster.address) as client:
        stream = await (prefilling if pool == "p" else decoding)(client, max_tokens=900)
        cluster.signal(victim, signal.SIGKILL)
        why = f"no {POOLS[pool]} worker is attached: waited 0.5 s after worker {victim} was gone"
        with pytest.raises(UnavailableError, match=why):
            await completed(stream)
        given = stream.token_ids
        assert given == cluster.expected(PROMPT, len(given))
        await cluster.nothing_left()
        cluster.start_worker(POOLS[pool], f"{victim}-again")
        await cluster.serving()
        done = await client.complete([5, 6, 7], max_tokens=5, timeout_s=SOON_S)
        assert done.token_ids == cluster.expected([5, 6, 7], 5)
    await cluster.nothing_left()


async def test_a_stopped_worker_is_removed_and_fenced(new_cluster):
    cluster = new_cluster("p1", "d1", "d2", **DYING)
    await cluster.serving(3)
    async with BatonClient(cluster.address) as client:
        stream = await decoding(client, max_tokens=150)
        victim = await worker_of(cluster, stream, "d")
        cluster.signal(victim, signal.SIGSTOP)
        assert await completed(stream) == cluster.expected(PROMPT, 150)
        async with asyncio.timeout(SOON_S):
            while victim in await attached(cluster):
                await asyncio.sleep(0.05)
        cluster.signal(victim, signal.SIGCONT)
        assert await cluster.exit_code(victim) == 1
        assert "fenced" in cluster.stderr(victim).splitlines()[-1]
    await cluster.nothing_left()


async def attached(cluster):
    """Returns the attached workers by ID."""
    async with AdminClient(cluster.address) as admin:
        return {worker.worker_id: worker for worker in await admin.list_workers()}


async def test_a_resumed_worker_sends_no_stale_tokens_and_serves_again(new_cluster):
    """The worker still runs requests that have moved, until it reads their cancellation."""
    cluster = new_cluster("p1", "d1", "d2", **DECODING)
    await cluster.serving(3)
    prompts = [[*PROMPT, salt] for salt in range(5, 13)]
    # The streams must still run when the stopped worker has been resumed.
    num_tokens = 900
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        streams = [client.generate(prompt, max_tokens=num_tokens) for prompt in prompts]
        reading = [asyncio.create_task(stream.complete()) for stream in streams]

        async def every(found):
            async with asyncio.timeout(SOON_S):
                while True:
                    requests = await admin.list_requests()
                    assert not any(one.done() for one in reading), (
                        "a stream ended before the checks"
                    )
                    if len(requests) == len(streams) and all(map(found, requests)):
                        return
                    await asyncio.sleep(0.05)

        def flows(request):
            decodes = request.state == admin_pb2.REQUEST_STATE_DECODING
            return decodes and request.completion_tokens > 3

        await every(flows)
        running = await admin.list_requests()
        moved = {one.request_id for one in running if one.decode_worker_id == "d1"}
        assert 0 < len(moved) < len(streams)
        with stopped(family(cluster.process("d1"))):
            await every(lambda one: flows(one) and one.decode_worker_id == "d2")
        async with asyncio.timeout(SOON_S):
            while True:
                woken = (await attached(cluster))["d1"]
                silent_s = to_seconds(woken.silent_for)
                if silent_s < 0.3 and not woken.load.num_running + woken.load.kv_tokens_used:
                    break
                await asyncio.sleep(0.05)
        # The worker has ended the moved requests, because they were cancelled.
        requests = {one.request_id: one for one in await admin.list_requests()}
        assert len(requests) == len(streams)
        for request_id, request in requests.items():
            assert request.attempt == (2 if request_id in moved else 1)
        async with asyncio.timeout(2 * SOON_S):
            answers = await asyncio.gather(*reading)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == cluster.expected(prompt, num_tokens)
            assert answer.text == cluster.vocabulary.tokenizer.decode(list(answer.token_ids))
        await cluster.nothing_left()
        # The resumed worker can serve new requests.
        cluster.signal("d2", signal.SIGTERM)
        assert await cluster.exit_code("d2") == 0
        stream = client.generate(PROMPT, max_tokens=12)
        assert await completed(stream) == cluster.expected(PROMPT, 12)
        assert await worker_of(cluster, stream, "d") == "d1"
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
            # These requests were dispatched before the worker began to drain.
            await stream.complete()
            assert stream.token_ids == cluster.expected([8, salt], 20)
        assert await cluster.exit_code(leaver) == 0
        async with AdminClient(cluster.address) as admin:
            left = [worker.worker_id for worker in await admin.list_workers()]
        assert left == ["d1" if leaver == "p1" else "p1"]
    await cluster.nothing_left()


async def test_a_worker_exits_when_its_transfer_service_dies(new_cluster):
    cluster = new_cluster("p1", "d1", **DYING)
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        stream = await decoding(client, max_tokens=150)
        for child in cluster.process("d1").children(recursive=True):
            child.kill()
        assert await cluster.exit_code("d1") == 1
        assert "transfer service" in cluster.stderr("d1").splitlines()[-1]
        cluster.start_worker("decode", "d1")
        assert await completed(stream) == cluster.expected(PROMPT, 150)
    await cluster.nothing_left()
