"""Limits of the control socket: frames in one message, and unread notifications."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from baton.kvtransfer import frames, local_wire
from baton.kvtransfer.arena import Arena, Segment
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.service import local_server
from baton.kvtransfer.service.local_server import LocalConnection
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.send_state import SenderLimits
from baton.kvtransfer.service.sender import Sender
from baton.kvtransfer.service.shell import TransferShell
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_transports import named
from tests.kvtransfer.small_engine import LAYERS, LAYOUT, LIMITS, SHARDS, messages_of

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
    shell = TransferShell(sender, receiver, negotiator, SimpleNamespace(), asyncio.Event())
    shell.describe_as("127.0.0.1:1", segment.name, size, size)
    local = await asyncio.get_running_loop().create_unix_server(
        lambda: LocalConnection(shell.handle_request, shell.connection_lost),
        sock=local_wire.bind(path),
    )
    port = await asyncio.to_thread(EnginePort, path)
    yield receiver, port
    port.close()
    local.close()
    shell.close_connections()
    segment.close()


def deliver(receiver):
    """Delivers one frame for each block."""
    for message in messages_of(ID, bytes(NUM_BLOCKS * LAYOUT.block_size_tokens), 0):
        for frame in frames.decode(message):
            receiver.handle_frame(1, frame, time.monotonic())


async def test_a_claim_comes_in_parts(service):
    receiver, port = service
    deliver(receiver)
    for shard in range(SHARDS):
        claim = await asyncio.to_thread(port.claim, ID, shard)
        assert [(frame.layer, frame.first_block) for frame in claim.frames] == EVERY_FRAME
        assert claim.num_blocks == NUM_BLOCKS
        port.release(ID, shard)
    assert await asyncio.to_thread(port.claim, ID, 0) is None
    assert port.alive
    assert receiver.num_live == 0


def test_as_many_frames_as_may_be_listed_fit_a_message():
    most = 2**32 - 1
    frame = pb.LocalFrame(
        handoff_id=ID, shard=most, layer=most, first_block=most, num_blocks=most,
        checksum=2**64 - 1,
    )  # fmt: skip
    one = pb.LocalReply(claimed=pb.LocalClaimed(frames=[frame])).ByteSize()
    assert one * local_wire.MAX_LISTED_FRAMES < local_wire.MAX_LOCAL_MESSAGE_BYTES


class Transport:
    """A transport to a client that reads nothing; it records what is written, and its end."""

    def __init__(self):
        self.written = []
        self.is_aborted = False

    def set_write_buffer_limits(self, high):
        pass

    def get_write_buffer_size(self):
        return 0

    def write(self, data):
        self.written.append(data)

    def abort(self):
        self.is_aborted = True


def unread(monkeypatch, states, *, is_main=False):
    """Returns the handoffs that a client learns when it reads at last, and its transport.

    The service merges at most three notifications.
    """
    monkeypatch.setattr(local_server, "_MAX_MERGED", 3)
    transport = Transport()
    connection = LocalConnection(lambda *_: None, lambda _: None)
    connection.connection_made(transport)
    connection.is_main = is_main
    connection.pause_writing()
    for number, state in enumerate(states):
        handoff = pb.LocalHandoffState(handoff_id=bytes([number]), state=state)
        connection.notify(("receive", handoff.handoff_id), pb.LocalReply(handoff=handoff))
    connection.resume_writing()
    messages = local_wire.Unpacker().feed(b"".join(transport.written))
    told = [pb.LocalReply.FromString(message).handoff.handoff_id[0] for message in messages]
    return told, transport


COMMITTED, FAILED = pb.HANDOFF_STATE_COMMITTED, pb.HANDOFF_STATE_FAILED
RELEASED = pb.HANDOFF_STATE_RELEASED


def test_an_engine_that_does_not_read_stays_connected(monkeypatch):
    """As that of a worker which only computes prompts, while their requests are cancelled."""
    states = [FAILED, COMMITTED, RELEASED, FAILED, FAILED]
    told, transport = unread(monkeypatch, states)
    assert told == [1, 3, 4]
    assert not transport.is_aborted


@pytest.mark.parametrize(("state", "is_main"), [(COMMITTED, False), (FAILED, True)])
def test_no_live_handoff_and_no_end_for_the_worker_is_dropped(monkeypatch, state, is_main):
    told, transport = unread(monkeypatch, 3 * [state], is_main=is_main)
    assert told == [0, 1, 2]
    assert not transport.is_aborted
    _, transport = unread(monkeypatch, 4 * [state], is_main=is_main)
    assert transport.is_aborted
