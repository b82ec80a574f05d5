"""Handoffs with more frames than one message of the control socket may list."""

import asyncio
import time
from types import SimpleNamespace

import pytest
from simulated_transports import named
from small_engine import LAYERS, LAYOUT, LIMITS, SHARDS, messages_of

from baton.kvtransfer import frames, local_wire
from baton.kvtransfer.arena import Arena, Segment
from baton.kvtransfer.control import EnginePort
from baton.kvtransfer.sending import SenderLimits
from baton.kvtransfer.service.core import TransferCore
from baton.kvtransfer.service.local_server import LocalConnection
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.sender import Sender
from baton.v1 import kv_transfer_pb2 as pb

ID, NUM_BLOCKS = b"h" * 16, 9
EVERY_FRAME = [(layer, block) for layer in range(LAYERS) for block in range(NUM_BLOCKS)]


@pytest.fixture
async def service(tmp_path, monkeypatch):
    """A receiver in a service whose messages hold eight frames, and a port to that service."""
    monkeypatch.setattr(local_wire, "MAX_LOCAL_MESSAGE_BYTES", 512)
    monkeypatch.setattr(local_wire, "MAX_LISTED_FRAMES", 8)
    size, path = LAYOUT.handoff_bytes(NUM_BLOCKS), str(tmp_path / "kv.sock")
    segment = Segment.create(2 * size)
    negotiator = named("grpc")
    limits = SenderLimits(max_wait_s=1, idle_timeout_s=1)
    sender = Sender(Arena(0, size), segment.memory, limits, negotiator)
    receiver = Receiver(Arena(size, size), segment.memory, LIMITS, negotiator.choose)
    receiver.configure(LAYOUT)
    core = TransferCore(sender, receiver, negotiator, SimpleNamespace(), asyncio.Event())
    core.describe_as("127.0.0.1:1", segment.name, size, size)
    local = await asyncio.get_running_loop().create_unix_server(
        lambda: LocalConnection(core.handle_request, core.connection_lost),
        sock=local_wire.bind(path),
    )
    port = await asyncio.to_thread(EnginePort, path)
    yield receiver, port
    port.close()
    local.close()
    core.close_connections()
    segment.close()


def deliver(receiver):
    """Delivers one frame for each block."""
    for message in messages_of(ID, bytes(NUM_BLOCKS * LAYOUT.block_size_tokens), 0):
        for frame in frames.decode(message):
            receiver.handle_frame(1, frame, time.monotonic())


async def test_a_claim_comes_in_parts(service):
    receiver, port = service
    deliver(receiver)
    for rank in range(SHARDS):
        claim = await asyncio.to_thread(port.claim, ID, rank)
        assert [(frame.layer, frame.first_block) for frame in claim.frames] == EVERY_FRAME
        assert claim.num_blocks == NUM_BLOCKS
        port.release(ID, rank)
    assert await asyncio.to_thread(port.claim, ID, 0) is None
    assert port.alive
    assert receiver.num_live == 0


def test_as_many_frames_as_may_be_listed_fit_a_message():
    most = 2**32 - 1
    frame = pb.LocalFrame(
        handoff_id=ID, rank=most, layer=most, first_block=most, num_blocks=most,
        checksum=2**64 - 1,
    )  # fmt: skip
    one = pb.LocalReply(claimed=pb.LocalClaimed(frames=[frame])).ByteSize()
    assert one * local_wire.MAX_LISTED_FRAMES < local_wire.MAX_LOCAL_MESSAGE_BYTES
