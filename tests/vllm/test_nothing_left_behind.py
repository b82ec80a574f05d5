"""After whatever ends or disturbs a request, nothing of it is left within two seconds."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest
import vllm_cases as cases
from vllm_cluster import DECODE, MAX_DECODES, SEND_BYTES, Cluster

from baton.client import errors
from baton.client.client import BatonClient
from baton.client.events import Tokens
from baton.client.stream import TokenStream
from baton.kvtransfer.control import EnginePort
from baton.v1 import admin_pb2, kv_transfer_pb2

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

LONG = 600


@contextlib.contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stops processes as kill -STOP does, and lets them go on after."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def in_state(cluster: Cluster, state: int) -> None:
    """Waits until one request is in a state."""
    async with asyncio.timeout(20):
        while not any(request.state == state for request in await cluster.requests()):
            await asyncio.sleep(0.01)


async def first_token(stream: TokenStream) -> Tokens:
    async for event in stream:
        if isinstance(event, Tokens):
            return event
    raise AssertionError("ended without a token")


def long_request(client: BatonClient, salt: int, **options: float) -> TokenStream:
    return client.generate(
        cases.prompt(200, 5000 + salt), temperature=0, max_tokens=LONG, ignore_eos=True, **options
    )


async def test_cancelled_while_queued(client: BatonClient, cluster: Cluster) -> None:
    running = [long_request(client, salt) for salt in range(MAX_DECODES)]
    await asyncio.gather(*(first_token(stream) for stream in running))
    queued = long_request(client, 99)
    await in_state(cluster, admin_pb2.REQUEST_STATE_QUEUED)
    await queued.aclose()
    for stream in running:
        await stream.aclose()
    await cluster.assert_idle()


async def test_cancelled_while_prefilling(client: BatonClient, cluster: Cluster) -> None:
    with stopped(cluster.engine_processes("prefill")):
        stream = long_request(client, 100)
        await in_state(cluster, admin_pb2.REQUEST_STATE_PREFILLING)
        await stream.aclose()
    await cluster.assert_idle()


async def test_cancelled_in_the_middle_of_a_chunked_prefill(
    client: BatonClient, cluster: Cluster
) -> None:
    for salt in range(8):
        stream = client.generate(
            cases.prompt(3 * cases.CHUNK + 9, 6000 + salt), max_tokens=20, temperature=0
        )
        await in_state(cluster, admin_pb2.REQUEST_STATE_PREFILLING)
        await asyncio.sleep(0.01 * salt)
        await stream.aclose()
    await cluster.assert_idle()


async def test_cancelled_while_handing_over(client: BatonClient, cluster: Cluster) -> None:
    with stopped([cluster.transfer_service("decode")]):
        stream = long_request(client, 101)
        # The first token does not wait for the baton.
        await first_token(stream)
        await in_state(cluster, admin_pb2.REQUEST_STATE_HANDING_OFF)
        await stream.aclose()
    await cluster.assert_idle()


async def test_cancelled_while_decoding(client: BatonClient, cluster: Cluster) -> None:
    stream = long_request(client, 102)
    await first_token(stream)
    await in_state(cluster, admin_pb2.REQUEST_STATE_DECODING)
    await stream.aclose()
    await cluster.assert_idle()


async def test_cancelled_at_any_moment(client: BatonClient, cluster: Cluster) -> None:
    async def one(salt: int) -> None:
        stream = long_request(client, 200 + salt)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * salt):
                async for _ in stream:
                    pass
        await stream.aclose()

    await asyncio.gather(*(one(salt) for salt in range(8)))
    await cluster.assert_idle()


async def test_client_killed(cluster: Cluster) -> None:
    client = subprocess.Popen(
        [sys.executable, "-m", "baton.cli.main", "generate", "--address", cluster.address]
        + ["--max-tokens", str(LONG), "--json", "The prompt is read by"],
        stdout=subprocess.PIPE,
    )
    assert client.stdout is not None
    assert client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    client.wait()
    client.stdout.close()
    await cluster.assert_idle()


async def test_deadline(client: BatonClient, cluster: Cluster) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        await long_request(client, 103, timeout_s=0.5).complete()
    await cluster.assert_idle()


async def test_preempted_decodes_give_the_right_tokens(
    client: BatonClient, cluster: Cluster
) -> None:
    """Eight requests outgrow the decode worker's 64 blocks: some wait with their baton committed,
    some lose their blocks after they loaded it."""
    prompts = [cases.prompt(180 + salt, 7000 + salt) for salt in range(8)]

    async def ask(prompt: list[int]) -> tuple[int, ...]:
        made = await client.complete(
            prompt, temperature=0, max_tokens=160, ignore_eos=True, timeout_s=120
        )
        return made.token_ids

    together = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    await cluster.assert_idle()
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == await ask(prompt)
    await cluster.assert_idle()


async def test_baton_longer_than_the_local_hit(client: BatonClient, cluster: Cluster) -> None:
    """The decode worker holds all of a prompt, then a part of the next one's."""
    base = cases.prompt(5 * cases.BLOCK_SIZE, 8000)
    answers = [
        (await client.complete(prompt, temperature=0, max_tokens=8)).token_ids
        for prompt in (base, base, base + cases.prompt(70, 8001), base + cases.prompt(70, 8001))
    ]
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    await cluster.assert_idle()


def committed(port: EnginePort) -> None:
    """Waits until the decode worker's transfer service has one whole handoff."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(s.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED for s in port.poll()):
            return
        time.sleep(0.005)
    raise AssertionError("no handoff was committed")


@pytest.mark.parametrize("lost_block", [0, 3])
async def test_staging_that_changed_is_not_loaded(
    lost_block: int, client: BatonClient, cluster: Cluster
) -> None:
    """A committed baton goes bad before it is loaded, from its first block or in mid-prompt."""
    prompt = cases.prompt(6 * cases.BLOCK_SIZE + 5, 9000 + lost_block)
    port = cluster.port("decode")
    try:
        port.subscribe()
        with stopped(cluster.engine_processes("decode")):
            stream = client.generate(prompt, temperature=0, max_tokens=12)
            first = await first_token(stream)
            await asyncio.to_thread(committed, port)
            num_blocks = 7
            block_bytes = (await cluster.workers())[DECODE].capacity.block_size_tokens * 1024
            # Alone in the arena, so at its beginning; layer 1 of 4.
            at = SEND_BYTES + (num_blocks + lost_block) * block_bytes + 11
            port.memory[at] ^= 0x55
        rest = [event async for event in stream if isinstance(event, Tokens)]
    finally:
        port.close()
    tokens = first.token_ids + tuple(token for event in rest for token in event.token_ids)
    again = await client.complete(prompt, temperature=0, max_tokens=12)
    assert tokens == again.token_ids
    await cluster.assert_idle()


async def test_baton_that_expired_is_computed_again(client: BatonClient, cluster: Cluster) -> None:
    prompt = cases.prompt(6 * cases.BLOCK_SIZE + 5, 9100)
    port = cluster.port("decode")
    try:
        port.subscribe()
        with stopped(cluster.engine_processes("decode")):
            stream = client.generate(prompt, temperature=0, max_tokens=12)
            first = await first_token(stream)
            await asyncio.to_thread(committed, port)
            deadline = time.monotonic() + 20
            while not any(
                state.state == kv_transfer_pb2.HANDOFF_STATE_FAILED for state in port.poll()
            ):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
        rest = [event async for event in stream if isinstance(event, Tokens)]
    finally:
        port.close()
    tokens = first.token_ids + tuple(token for event in rest for token in event.token_ids)
    again = await client.complete(prompt, temperature=0, max_tokens=12)
    assert tokens == again.token_ids
    await cluster.assert_idle()
