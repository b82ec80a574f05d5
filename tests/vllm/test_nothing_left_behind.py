"""Soon after any end or disturbance of a request, nothing of it is left."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from baton.client import errors
from baton.client.client import BatonClient
from baton.client.events import Tokens
from baton.client.stream import TokenStream
from baton.kvtransfer import local_wire
from baton.kvtransfer.engine_port import EnginePort
from baton.v1 import admin_pb2, kv_transfer_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import DECODE, MAX_DECODES, SEND_BYTES, Cluster
from tests.vllm.worker_parts import stopped

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

LONG = 600
COMMITTED = (kv_transfer_pb2.HANDOFF_STATE_COMMITTED,)
# Keys and values of two heads of 64 values each, in float32.
BYTES_PER_TOKEN_AND_LAYER = 2 * 2 * 64 * 4
NUM_LAYERS = 4


async def in_state(cluster: Cluster, state: int, *, request_id: str = "") -> None:
    """Waits until a request is in a state: the named request, or any."""
    async with asyncio.timeout(120):
        while not any(
            request.state == state and request_id in ("", request.request_id)
            for request in await cluster.requests()
        ):
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


async def test_vllms_files_are_removed_with_the_workers_directory(cluster: Cluster) -> None:
    for role in ("prefill", "decode"):
        line = cluster.worker_process(role).cmdline()
        directory = line[line.index("--directory") + 1]
        # Ranks find each other through this file, and leave it when they are killed.
        assert glob.glob(f"{directory}/vllm_dist_*")


async def test_a_request_cancelled_while_queued_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    others = [long_request(client, salt) for salt in range(MAX_DECODES)]
    for stream in others:
        # The request is accepted: it runs, or waits for the blocks of earlier requests.
        await anext(stream)
    queued = long_request(client, 99)
    await anext(queued)
    await first_token(others[0])
    await in_state(cluster, admin_pb2.REQUEST_STATE_QUEUED, request_id=queued.request_id)
    await queued.aclose()
    for stream in others:
        await stream.aclose()
    await cluster.assert_idle()


async def test_a_request_cancelled_while_prefilling_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    with stopped(cluster.engine_processes("prefill")):
        stream = long_request(client, 100)
        await in_state(cluster, admin_pb2.REQUEST_STATE_PREFILLING)
        await stream.aclose()
    await cluster.assert_idle()


async def test_a_request_cancelled_between_prefill_chunks_leaves_nothing(
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


async def test_a_request_cancelled_during_its_handoff_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    with stopped([cluster.transfer_service("decode")]):
        stream = long_request(client, 101)
        # The first token does not wait for the handoff.
        await first_token(stream)
        await in_state(cluster, admin_pb2.REQUEST_STATE_HANDING_OFF)
        await stream.aclose()
    await cluster.assert_idle()


async def test_a_request_cancelled_while_decoding_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    stream = long_request(client, 102)
    await first_token(stream)
    await in_state(cluster, admin_pb2.REQUEST_STATE_DECODING)
    await stream.aclose()
    await cluster.assert_idle()


async def test_a_request_cancelled_at_a_random_moment_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    async def one(salt: int) -> None:
        stream = long_request(client, 200 + salt)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * salt):
                async for _ in stream:
                    pass
        await stream.aclose()

    await asyncio.gather(*(one(salt) for salt in range(8)))
    await cluster.assert_idle()


async def test_a_killed_client_leaves_nothing(cluster: Cluster) -> None:
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


async def test_a_request_that_passes_its_deadline_leaves_nothing(
    client: BatonClient, cluster: Cluster
) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        await long_request(client, 103, timeout_s=0.5).complete()
    await cluster.assert_idle()


async def test_preempted_decodes_give_the_right_tokens(
    client: BatonClient, cluster: Cluster, expected: dict[str, cases.Case]
) -> None:
    """Eight requests outgrow the decode worker's 64 blocks.

    Some wait with a committed handoff, and some lose their blocks after they have loaded it.
    """
    chosen = [expected[f"outgrow-{index}"] for index in range(8)]
    together = await asyncio.gather(*(tokens_of(client, case) for case in chosen))
    assert together == [case["expected"]["token_ids"] for case in chosen]
    await cluster.assert_idle()


async def test_a_handoff_longer_than_the_local_hit(
    client: BatonClient, cluster: Cluster, expected: dict[str, cases.Case]
) -> None:
    """The decode worker's cache holds nothing of a prompt, then all of it, then a part."""
    for name in ("hit-0", "hit-0", "hit-1", "hit-1"):
        case = expected[name]
        assert await tokens_of(client, case) == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def tokens_of(client: BatonClient, case: cases.Case) -> list[int]:
    made = await client.complete(case["prompt"], timeout_s=120, **case["sampling"])
    return list(made.token_ids)


def committed(port: EnginePort) -> None:
    """Waits until the decode worker's transfer service has a committed handoff."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if any(s.state in COMMITTED for s in port.poll()):
            return
        time.sleep(0.005)
    raise AssertionError("no handoff was committed")


def change_staging(port: EnginePort, block: int) -> None:
    """Flips a bit of layer 1 of a handoff of 7 blocks; no other handoff is in the arena."""
    block_bytes = cases.BLOCK_SIZE * BYTES_PER_TOKEN_AND_LAYER
    port.memory[SEND_BYTES + (7 + block) * block_bytes + 11] ^= 0x55


async def expire(port: EnginePort) -> None:
    """Waits until the committed handoff has expired."""
    async with asyncio.timeout(120):
        while not any(state.state == kv_transfer_pb2.HANDOFF_STATE_FAILED for state in port.poll()):
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def held_handoff(
    client: BatonClient, cluster: Cluster, case: cases.Case
) -> AsyncIterator[tuple[TokenStream, list[int], EnginePort]]:
    """Yields a request whose first token is out and whose handoff is committed but not loaded."""
    port = cluster.port("decode")
    try:
        port.subscribe()
        with stopped(cluster.engine_processes("decode")):
            stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
            first = await first_token(stream)
            await asyncio.to_thread(committed, port)
            yield stream, list(first.token_ids), port
    finally:
        port.close()


async def rest_of(stream: TokenStream) -> list[int]:
    events = [event async for event in stream if isinstance(event, Tokens)]
    return [token for event in events for token in event.token_ids]


@pytest.mark.parametrize(("name", "lost_block"), [("lost-0", 0), ("lost-1", 3), ("lost-seeded", 2)])
async def test_staging_that_changed_is_not_loaded(
    name: str,
    lost_block: int,
    client: BatonClient,
    cluster: Cluster,
    expected: dict[str, cases.Case],
) -> None:
    """A committed handoff is altered before it is loaded, in its first or a middle block."""
    case = expected[name]
    async with held_handoff(client, cluster, case) as (stream, tokens, port):
        change_staging(port, lost_block)
    tokens += await rest_of(stream)
    assert tokens == case["expected"]["token_ids"]
    # The prefix cache holds nothing of the handoff either.
    assert await tokens_of(client, case) == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def test_a_handoff_that_expired_is_computed_again(
    client: BatonClient, cluster: Cluster, expected: dict[str, cases.Case]
) -> None:
    case = expected["lost-2"]
    async with held_handoff(client, cluster, case) as (stream, tokens, port):
        await expire(port)
    tokens += await rest_of(stream)
    assert tokens == case["expected"]["token_ids"]
    assert await tokens_of(client, case) == case["expected"]["token_ids"]
    await cluster.assert_idle()


async def test_cancel_while_a_handoff_fails_leaves_no_bad_blocks(
    client: BatonClient, cluster: Cluster, expected: dict[str, cases.Case]
) -> None:
    """Without Baton, vLLM would keep the blocks of a failed load cached after a cancel."""
    case = expected["lost-3"]
    async with held_handoff(client, cluster, case) as (stream, _, port):
        change_staging(port, 1)
    await stream.aclose()
    assert await tokens_of(client, case) == case["expected"]["token_ids"]
    await cluster.assert_idle()


class LocalCaller:
    """A connection to a worker's transfer service that waits for each reply."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(60)
        self._socket.connect(path)
        self._unpacker = local_wire.Unpacker()

    def call(self, request: kv_transfer_pb2.LocalRequest) -> kv_transfer_pb2.LocalReply:
        request.call_id = 1
        self._socket.sendall(local_wire.encode(request))
        while not (replies := list(self._unpacker.feed(self._socket.recv(2**16)))):
            pass
        reply = kv_transfer_pb2.LocalReply.FromString(replies[0])
        assert not reply.error, reply.error
        return reply

    def statistics(self) -> kv_transfer_pb2.LocalStatistics:
        return self.call(
            kv_transfer_pb2.LocalRequest(stats=kv_transfer_pb2.LocalStats())
        ).statistics

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def full_staging(cluster: Cluster, role: str, target: str) -> Iterator[LocalCaller]:
    """Yields while a handoff without frames fills the staging of its sender and its receiver.

    Args:
        cluster: The cluster.
        role: Role of the worker that sends the handoff.
        target: Address of the transfer service that receives the handoff.
    """
    num_blocks = SEND_BYTES // (cases.BLOCK_SIZE * BYTES_PER_TOKEN_AND_LAYER * NUM_LAYERS)
    wanted = kv_transfer_pb2.LocalOpenSend(
        handoff_id=secrets.token_bytes(16),
        target=target,
        num_blocks=num_blocks,
        num_tokens=num_blocks * cases.BLOCK_SIZE,
        wait_ms=5000,
    )
    caller = LocalCaller(cluster.socket_path(role))
    try:
        caller.call(kv_transfer_pb2.LocalRequest(open_send=wanted))
        yield caller
        abort = kv_transfer_pb2.LocalAbortSend(handoff_id=wanted.handoff_id)
        caller.call(kv_transfer_pb2.LocalRequest(abort_send=abort))
    finally:
        caller.close()


async def above_zero(caller: LocalCaller, name: str) -> None:
    """Waits until a number in the statistics of a transfer service is above 0."""
    async with asyncio.timeout(120):
        while not getattr(caller.statistics(), name):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("role", "used", "num_waiting"),
    [
        ("prefill", "send_bytes_used", "num_waiting_sends"),
        ("decode", "receive_bytes_used", "num_waiting_receives"),
    ],
)
async def test_a_handoff_waits_for_staging_at_either_end(
    role: str,
    used: str,
    num_waiting: str,
    client: BatonClient,
    cluster: Cluster,
    expected: dict[str, cases.Case],
) -> None:
    case, num_loaded = expected[f"staging-{role}"], cluster.handoff_tokens()
    # With role "decode" the decode worker sends to itself, so the prefill worker has room.
    target = (await cluster.workers())[DECODE].kv_address
    with full_staging(cluster, role, target) as caller:
        await above_zero(caller, used)
        stream = client.generate(case["prompt"], timeout_s=60, **case["sampling"])
        await above_zero(caller, num_waiting)
    tokens = await rest_of(stream)
    assert tokens == case["expected"]["token_ids"]
    # The handoff was loaded all the same.
    async with asyncio.timeout(120):
        while cluster.handoff_tokens() < num_loaded + len(case["prompt"]):
            await asyncio.sleep(0.05)
    await cluster.assert_idle()
