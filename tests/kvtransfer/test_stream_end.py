"""When a peer dies, gRPC ends its stream and cancels its call, in any order; the handler must end.

A real peer hits these moments too rarely, so the tests do what gRPC does at each moment.
"""

import asyncio
from types import SimpleNamespace

import pytest

from baton.kvtransfer.service import grpc_stream
from baton.kvtransfer.service.grpc_stream import HandoffServicer
from baton.v1 import kv_transfer_pb2 as pb

# Steps of the event loop: more than the end of a stream takes.
NUM_MOMENTS = 12
# Longest wait for something that must happen.
WAIT_S = 120.0


class Streams:
    """A handler that records which streams are open."""

    def __init__(self):
        self.open, self.num_started = set(), 0

    def stream_started(self, incoming):
        self.num_started += 1
        self.open.add(self.num_started)
        return self.num_started

    def stream_ended(self, stream):
        self.open.remove(stream)


async def stream_of(end):
    """Yields no messages, and ends when told to."""
    await end.wait()
    return
    yield


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
async def test_a_call_cancelled_as_its_stream_ends_is_forgotten(moment):
    streams, end = Streams(), asyncio.Event()
    servicer = HandoffServicer(streams)
    context = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1")
    call = asyncio.create_task(servicer._serve(stream_of(end), context))
    await asyncio.sleep(0)
    assert streams.open
    end.set()
    for _ in range(moment):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    assert streams.num_started == 1
    assert not streams.open


class Replies(Streams):
    """A handler that replies to each stream at once."""

    def stream_started(self, incoming):
        incoming.reply(pb.HandoffReply())
        return super().stream_started(incoming)


async def test_a_stream_whose_sender_reads_no_reply_is_ended(monkeypatch):
    """gRPC takes no more replies when the sender's window is full."""
    monkeypatch.setattr(grpc_stream, "WRITE_TIMEOUT_S", 0.01)
    streams, never = Replies(), asyncio.Event()
    context = SimpleNamespace(peer=lambda: "ipv4:127.0.0.1:1", write=lambda reply: never.wait())
    servicer = HandoffServicer(streams)
    async with asyncio.timeout(WAIT_S):
        await servicer._serve(stream_of(never), context)
    assert streams.num_started == 1
    assert not streams.open
