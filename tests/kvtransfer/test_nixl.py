"""NIXL between real services and processes of this host, over UCX: its own choice, and TCP."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.engine_port import filled_frame
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.transports.nixl_transport import MAX_IDLE_PEERS
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.raw_sender import dialled
from tests.kvtransfer.whole_handoff import hand_over, hand_over_together

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None, reason="nixl is not installed"
)

OWNER = str(Path(__file__).parent / "nixl_owner.py")
# Part of a core; an agent that spins takes nearly a whole one.
IDLE_CORES = 0.3


@pytest.fixture(params=["", "tcp"])
def wire(request, monkeypatch):
    """Whether UCX chooses among its wires, or may use only TCP."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


@pytest.fixture
def tcp(monkeypatch):
    """With TCP, the process that owns the memory takes part in each read."""
    monkeypatch.setenv("UCX_TLS", "tcp")


def loads(worker, library):
    return library in Path(f"/proc/{worker.client.pid}/maps").read_text()


async def test_nixl_carries_handoffs_of_every_size(wire, start, handoff):
    sender, receiver = await asyncio.gather(*(start(transports=["nixl"]) for _ in range(2)))
    for num_blocks in (1, 16, 7):
        sent = await hand_over(sender, receiver, handoff(num_blocks))
        assert (sent.transport, sent.num_fallbacks) == ("nixl", 0)
    # NIXL needs no torch, which would triple the memory of the service.
    assert loads(sender, "nixl")
    assert not loads(sender, "libtorch")
    many = [handoff(3) for _ in range(5)]
    for one in many:
        await one.open(sender, receiver.client.address)
    for one in many:
        one.fill(sender)
    for one in many:
        await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
        assert one.load(receiver) == one.data
    (peer,) = (await sender.empty()).peers
    assert (peer.transport, peer.reason) == ("nixl", "")
    (moved,) = (await receiver.empty()).transports
    assert moved.name == "nixl"


async def test_what_ucx_prints_keeps_no_service_from_starting(start, handoff, monkeypatch):
    monkeypatch.setenv("UCX_NOT_A_SETTING", "UCX warns of this variable")
    sender, receiver = await asyncio.gather(*(start(transports=["nixl"]) for _ in range(2)))
    assert (await hand_over(sender, receiver, handoff(2))).transport == "nixl"


async def test_agents_start_when_shared_memory_could_not_be_used(start, handoff):
    sender, receiver = await asyncio.gather(
        start(transports=["shm", "nixl", "grpc"]), start(transports=["nixl", "grpc"])
    )
    sent = await hand_over(sender, receiver, handoff(2))
    assert sent.transport == "grpc"
    (peer,) = (await sender.empty()).peers
    assert "nixl: is starting" in peer.reason
    async with asyncio.timeout(120):
        while sent.transport != "nixl":
            sent = await hand_over(sender, receiver, handoff(2))
    (peer,) = (await sender.empty()).peers
    assert peer.reason.startswith("shm: not among the receiver's")
    assert "nixl" not in peer.reason.partition("(")[0]


async def test_a_pair_with_shared_memory_starts_no_agent(start, handoff):
    sender, receiver = await asyncio.gather(start(), start())
    sent = await hand_over(sender, receiver, handoff(2))
    assert sent.transport == "shm"
    assert not any(loads(worker, "nixl") for worker in (sender, receiver))


async def test_bytes_that_are_not_the_announced_ones_are_refused(start, handoff):
    sender, receiver = await asyncio.gather(*(start(transports=["nixl", "grpc"]) for _ in range(2)))
    one = handoff(8)
    await one.open(sender, receiver.client.address)
    one.fill(sender, [0, 1, 2], [0])
    sender.port.send_frames(
        [
            filled_frame(one.handoff_id, 1, layer, 0, 8, b"other", last=layer == 2)
            for layer in range(3)
        ]
    )
    sent = await sender.sent(one.handoff_id)
    assert (sent.reason, sent.num_fallbacks) == (pb.REFUSAL_REASON_CHECKSUM, 1)
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_killed_sender_fails_only_its_handoffs(wire, start, handoff):
    sender, receiver, other = await asyncio.gather(*(start(transports=["nixl"]) for _ in range(3)))
    await hand_over(sender, receiver, handoff(4))
    one = handoff(8)
    await one.open(sender, receiver.client.address)
    one.fill(sender, [0])
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_RECEIVING)
    os.kill(sender.client.pid, signal.SIGKILL)
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    await receiver.empty()
    await hand_over(other, receiver, handoff(4))


async def test_an_idle_agent_does_not_spin(start, handoff):
    sender, receiver = await asyncio.gather(*(start(transports=["nixl"]) for _ in range(2)))
    await hand_over(sender, receiver, handoff(4))
    for worker in (sender, receiver):
        process, started = psutil.Process(worker.client.pid), time.monotonic()
        before = process.cpu_times()
        await asyncio.sleep(2.0)
        after, wall_s = process.cpu_times(), time.monotonic() - started
        used_s = after.user + after.system - before.user - before.system
        assert used_s / wall_s < IDLE_CORES


# ---- Senders whose memory belongs to another process, which tests stop and kill.


@dataclass
class Owner:
    """A process whose memory holds the bytes of a handoff."""

    process: subprocess.Popen
    offer: pb.TransportOffer

    def signal(self, number):
        self.process.send_signal(number)

    def alter(self, offset):
        """Writes a zero; returns when it is written."""
        self.process.stdin.write(f"{offset}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == f"{offset}\n"


@contextmanager
def owner_of(data, path):
    path.write_bytes(data)
    process = subprocess.Popen(
        [sys.executable, OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        metadata, address, size = json.loads(process.stdout.readline())
        path.unlink()
        offer = pb.TransportOffer(
            name="nixl",
            nixl_agent=bytes.fromhex(metadata),
            nixl_address=address,
            nixl_bytes=size,
        )
        yield Owner(process, offer)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@pytest.fixture
async def receiver(start, layout):
    # Room for exactly two of the handoffs below.
    size = layout.handoff_bytes(8)
    return await start(transports=["nixl", "grpc"], receive_bytes=2 * size, open_timeout_s=2)


@pytest.fixture
def open_stream(layout, tmp_path):
    """Opens a handoff whose references name the memory of an owner, by NIXL."""

    @asynccontextmanager
    async def opened(receiver, one):
        with owner_of(one.data, tmp_path / "memory") as owner:
            async with dialled(receiver, layout, one) as raw:
                await raw.send(raw.open(offers=[owner.offer]))
                reply = await raw.reply()
                assert (reply.kind, reply.transport) == (pb.HandoffReply.KIND_OPENED, "nixl")
                yield owner, raw

    return opened


async def test_a_read_of_a_stopped_owner_keeps_its_extent_until_it_ends(
    tcp, receiver, open_stream, handoff, start, layout
):
    one, size = handoff(8), layout.handoff_bytes(8)
    sender = await start(transports=["grpc"])
    async with open_stream(receiver, one) as (owner, raw):
        owner.signal(signal.SIGSTOP)
        abort = frames.encode(FrameKind.ABORT, one.handoff_id, one.epoch)
        await raw.send(*raw.references(), *raw.commits(), abort)
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_CANCELLED
        # The other half of staging is used again and again; this half is not.
        for _ in range(3):
            await hand_over(sender, receiver, handoff(8))
        stats = await receiver.client.stats()
        assert (stats.num_receives, stats.receive_bytes_used) == (0, size)
        owner.signal(signal.SIGCONT)
        await receiver.empty()
    await hand_over_together(sender, receiver, handoff(8), handoff(8))


async def test_a_killed_owner_ends_the_reads_of_its_memory(tcp, receiver, open_stream, handoff):
    async with open_stream(receiver, handoff(8)) as (owner, raw):
        owner.signal(signal.SIGSTOP)
        await raw.send(*raw.references(), *raw.commits())
        owner.signal(signal.SIGKILL)
        reply = await raw.reply()
        assert reply.reason == pb.REFUSAL_REASON_TRANSPORT
        assert "the sender's memory could not be read" in reply.detail
    await receiver.empty()


async def test_memory_that_changes_before_the_read_is_refused(wire, receiver, open_stream, handoff):
    one = handoff(8)
    one.data = one.data[:-1] + b"\1"
    async with open_stream(receiver, one) as (owner, raw):
        owner.alter(len(one.data) - 1)
        await raw.send(*raw.references(), *raw.commits())
        reply = await raw.reply()
        assert reply.reason == pb.REFUSAL_REASON_CHECKSUM
    await receiver.empty()


@pytest.mark.parametrize("metadata", [b"not an agent", b"nixl" * 999])
async def test_metadata_that_is_none_fails_one_handoff(receiver, layout, handoff, start, metadata):
    one = handoff(8)
    offer = pb.TransportOffer(name="nixl", nixl_agent=metadata, nixl_address=1, nixl_bytes=2**40)
    async with dialled(receiver, layout, one) as raw:
        await raw.send(raw.open(offers=[offer]))
        assert (await raw.reply()).kind == pb.HandoffReply.KIND_OPENED
        await raw.send(*raw.references())
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_TRANSPORT
    await receiver.empty()
    await hand_over(await start(transports=["nixl"]), receiver, handoff(8))


async def test_a_service_remembers_a_bounded_number_of_unused_senders(receiver, layout, handoff):
    def offers(name):
        agent = pb.TransportOffer(name="nixl", nixl_agent=name, nixl_address=1, nixl_bytes=2**40)
        return [agent, pb.TransportOffer(name="grpc")]

    async def opened(name, *, then_fails=False):
        """Returns the transport that a sender gets; the sender then ends its stream."""
        one = handoff(1)
        async with dialled(receiver, layout, one) as raw:
            await raw.send(raw.open(offers=offers(name)))
            reply = await raw.reply()
            if then_fails:
                await raw.send(*raw.references())
                assert (await raw.reply()).reason == pb.REFUSAL_REASON_TRANSPORT
        await receiver.empty()
        return reply.transport

    assert await opened(b"fails", then_fails=True) == "nixl"
    assert await opened(b"fails") == "grpc"
    for number in range(MAX_IDLE_PEERS):
        assert await opened(f"sender {number}".encode()) == "nixl"
    # The service has forgotten the oldest sender, and thus that its reads failed a moment ago.
    assert await opened(b"fails") == "nixl"


async def test_reads_that_never_end_end_the_service(tcp, start, open_stream, handoff, layout):
    size = layout.handoff_bytes(8)
    receiver = await start(
        transports=["nixl"], receive_bytes=2 * size, idle_timeout_s=1, open_timeout_s=1
    )
    async with open_stream(receiver, handoff(8)) as (owner, raw):
        owner.signal(signal.SIGSTOP)
        await raw.send(*raw.references())
        reply = await raw.reply()
        assert reply.reason == pb.REFUSAL_REASON_TRANSPORT
        assert reply.detail == "reads of the sender's memory have not ended in time"
        async with asyncio.timeout(120):
            await receiver.client.gone.wait()
    assert receiver.client.gone_reason == (
        "transfer service: ended with exit code 1: "
        f"kv-transfer: {size} bytes of staging wait for reads that do not end"
    )


async def test_a_service_ends_while_a_read_is_under_way(tcp, receiver, open_stream, handoff):
    async with open_stream(receiver, handoff(8)) as (owner, raw):
        owner.signal(signal.SIGSTOP)
        await raw.send(*raw.references(), *raw.commits())
        await receiver.received(raw.handoff.handoff_id, pb.HANDOFF_STATE_RECEIVING)
        await receiver.client.close()
        assert receiver.client._process.returncode == 0
