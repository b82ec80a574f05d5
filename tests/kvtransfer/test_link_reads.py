"""A real service reads by a link whose sending end answers late, twice, wrongly or never."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.transports import links as links_module
from baton.kvtransfer.transports.collective import SendingLink
from baton.kvtransfer.transports.links import Links
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.raw_sender import dialled
from tests.kvtransfer.whole_handoff import hand_over, hand_over_together

# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0


@dataclass
class Held:
    """Requests for bytes that the sending end has got and does not answer until `release`."""

    requests: list[tuple[SendingLink, pb.LinkMessage]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def some(self):
        await asyncio.wait_for(self.arrived.wait(), WAIT_S)

    def release(self, times=1):
        for link, message in self.requests * times:
            SendingLink._handle(link, message)
        self.requests.clear()


@pytest.fixture
def held(monkeypatch):
    kept = Held()

    class HoldingLink(SendingLink):
        def _handle(self, message):
            if message.HasField("read"):
                kept.requests.append((self, message))
                kept.arrived.set()
            else:
                super()._handle(message)

    monkeypatch.setattr(links_module, "SendingLink", HoldingLink)
    return kept


@pytest.fixture
def open_stream(layout):
    """Opens a handoff whose references name this process's memory, by a link of this process."""

    @contextlib.asynccontextmanager
    async def opened(receiver, one):
        handler = SimpleNamespace(fingerprint=layout.fingerprint)
        links = Links(
            "gloo", handler, memoryview(bytearray(one.data)),
            open_timeout_s=WAIT_S, frame_timeout_s=WAIT_S,
        )  # fmt: skip
        target = receiver.client.address
        try:
            await links.wait_decided(target)
            offer = pb.TransportOffer(name="gloo", link_id=links.link_id(target))
            async with dialled(receiver, layout, one) as raw:
                await raw.send(raw.open(offers=[offer]))
                reply = await raw.reply()
                assert (reply.kind, reply.transport) == (pb.HandoffReply.KIND_OPENED, "gloo")
                yield raw
        finally:
            await links.close()

    return opened


@pytest.fixture
def receive(start, layout):
    """Starts a receiver with room for exactly two of the handoffs below."""

    async def started(**config):
        size = layout.handoff_bytes(8)
        return await start(
            transports=["gloo", "grpc"], receive_bytes=2 * size, open_timeout_s=WAIT_S, **config
        )

    return started


async def test_the_extent_of_a_late_read_is_not_used_before_the_read_ends(
    held, start, receive, open_stream, handoff, layout
):
    sender, receiver = await asyncio.gather(start(transports=["grpc"]), receive())
    one = handoff(8)
    async with open_stream(receiver, one) as raw:
        await raw.send(*raw.references(), *raw.commits())
        await held.some()
        await raw.send(frames.encode(FrameKind.ABORT, one.handoff_id, one.epoch))
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_CANCELLED
        # The other half of staging is used again and again; this half is not.
        for _ in range(3):
            await hand_over(sender, receiver, handoff(8))
        stats = await receiver.client.stats()
        assert (stats.num_receives, stats.receive_bytes_used) == (0, layout.handoff_bytes(8))
        # The first answers let the receiver ask for the rest.
        async with asyncio.timeout(WAIT_S):
            while (await receiver.client.stats()).receive_bytes_used:
                held.release()
                await asyncio.sleep(0.02)
    await hand_over_together(sender, receiver, handoff(8), handoff(8))
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_handoff_whose_reads_are_never_answered_may_be_sent_again(
    held, receive, open_stream, handoff
):
    # An operation of the group may take half of this.
    receiver, one = await receive(idle_timeout_s=2), handoff(8)
    async with open_stream(receiver, one) as raw:
        await raw.send(*raw.references(), *raw.commits())
        reply = await raw.reply()
        assert reply.reason == pb.REFUSAL_REASON_TRANSPORT
        assert "the sender's memory could not be read" in reply.detail
        # The link is over, so nothing that is sent now arrives.
        held.release()
        one.epoch = 2
        await raw.send(raw.open(offers=[pb.TransportOffer(name="grpc")]))
        assert (await raw.reply()).kind == pb.HandoffReply.KIND_OPENED
        await raw.send(*raw.data(), *raw.commits())
        assert (await raw.reply()).kind == pb.HandoffReply.KIND_COMMITTED
        await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
        assert one.load(receiver) == one.data
    await receiver.empty()


async def test_bytes_that_are_sent_twice_never_commit(held, receive, open_stream, handoff):
    receiver, one = await receive(), handoff(8)
    async with open_stream(receiver, one) as raw:
        await raw.send(*raw.references(), *raw.commits())
        await held.some()
        held.release(times=2)
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_CHECKSUM
        await raw.send(frames.encode(FrameKind.ABORT, one.handoff_id, one.epoch))
    await receiver.empty()
