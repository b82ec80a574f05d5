"""The transport that two real services take, the reason, and what happens when it fails."""

import asyncio
import os
import signal
from pathlib import Path
from typing import ClassVar

import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.arena import SEGMENT_PREFIX, Segment
from baton.kvtransfer.engine_port import filled_frame
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.grpc_methods import link_method
from baton.kvtransfer.transports import nccl_transport, registry, shm_transport
from baton.kvtransfer.transports.negotiation import Negotiator
from baton.kvtransfer.transports.transport import (
    EndedPull,
    Pull,
    ServiceContext,
    Transport,
)
from baton.runtime.kv.kv_transports import TRANSPORTS
from baton.runtime.network import rpc
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.raw_sender import dialled
from tests.kvtransfer.simulated_transports import NamedTransport, named
from tests.kvtransfer.whole_handoff import hand_over


def maps(pid):
    return Path(f"/proc/{pid}/maps").read_text()


async def test_workers_of_one_host_share_memory_and_say_so(start, handoff):
    sender, receiver = await asyncio.gather(start(), start())
    sent = await hand_over(sender, receiver, handoff(8))
    assert (sent.transport, sent.num_fallbacks) == ("shm", 0)
    assert receiver.receives[sent.handoff_id].transport == "shm"
    (peer,) = (await sender.empty()).peers
    assert (peer.target, peer.transport, peer.reason) == (receiver.client.address, "shm", "")
    (moved,) = (await receiver.empty()).transports
    assert (moved.name, moved.bytes_received) == ("shm", sent.num_bytes)


async def test_a_transport_that_the_receiver_cannot_use_is_skipped_with_the_reason(start, handoff):
    sender, receiver = await asyncio.gather(start(), start(transports=["grpc"]))
    sent = await hand_over(sender, receiver, handoff(8))
    assert sent.transport == "grpc"
    (peer,) = (await sender.empty()).peers
    assert peer.transport == "grpc"
    assert "shm: not among the receiver's kv_transfer.transports" in peer.reason


async def test_a_pair_with_nothing_in_common_is_refused_by_name(start, handoff):
    sender, receiver = await asyncio.gather(start(transports=["shm"]), start(transports=["grpc"]))
    one = handoff(2)
    await one.open(sender, receiver.client.address)
    sent = await sender.sent(one.handoff_id)
    assert (sent.state, sent.reason) == (
        pb.LocalSendState.STATE_FAILED,
        pb.REFUSAL_REASON_TRANSPORT,
    )
    assert "none of the offered transports can be used: shm: not among" in sent.detail
    await asyncio.gather(sender.empty(), receiver.empty())


@pytest.mark.parametrize("first", ["shm", "gloo"])
async def test_a_send_fails_when_every_transport_alters_its_bytes(start, handoff, first):
    sender, receiver = await asyncio.gather(
        *(start(transports=[first, "grpc"], open_timeout_s=30) for _ in range(2))
    )
    async with asyncio.timeout(120):
        while (await hand_over(sender, receiver, handoff(1))).transport != first:
            pass
    one = handoff(8)
    await one.open(sender, receiver.client.address)
    good, one.data = one.data, bytes(len(one.data))
    one.fill(sender, [0, 1, 2], [0])
    # The checksums are those of the correct bytes, but staging holds others.
    one.data = good
    filled = [
        filled_frame(one.handoff_id, 1, layer, 0, 8, b"other", last=layer == 2)
        for layer in range(3)
    ]
    sender.port.send_frames(filled)
    sent = await sender.sent(one.handoff_id)
    assert (sent.reason, sent.num_fallbacks) == (pb.REFUSAL_REASON_CHECKSUM, 1)
    fallbacks = {each.name: each.fallbacks for each in (await sender.empty()).transports}
    assert fallbacks[first] == 1
    state = await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    assert state.reason == pb.REFUSAL_REASON_CHECKSUM
    assert one.load(receiver) is None
    await receiver.empty()


async def test_a_process_group_carries_the_handoffs_of_its_pair(start, handoff):
    sender, receiver = await asyncio.gather(
        start(transports=["gloo"], open_timeout_s=30),
        start(transports=["gloo", "grpc"], open_timeout_s=30),
    )
    for num_blocks in (1, 8, 16):
        sent = await hand_over(sender, receiver, handoff(num_blocks))
        assert (sent.transport, sent.num_fallbacks) == ("gloo", 0)
    (peer,) = (await sender.empty()).peers
    assert (peer.transport, peer.reason) == ("gloo", "")
    await receiver.empty()


async def test_handoffs_use_another_transport_until_the_link_is_joined(start, handoff):
    sender, receiver = await asyncio.gather(
        start(transports=["gloo", "grpc"], open_timeout_s=30),
        start(transports=["gloo", "grpc"], open_timeout_s=30),
    )
    sent = await hand_over(sender, receiver, handoff(4))
    assert sent.transport == "grpc"
    (peer,) = (await sender.empty()).peers
    assert peer.reason == "gloo: is being joined"
    async with asyncio.timeout(120):
        while sent.transport != "gloo":
            sent = await hand_over(sender, receiver, handoff(4))
    await asyncio.gather(sender.empty(), receiver.empty())


async def test_a_killed_end_of_a_link_fails_only_its_handoffs(start, handoff):
    sender, receiver, second, other = await asyncio.gather(
        *(start(transports=["gloo"], open_timeout_s=30) for _ in range(4))
    )

    async def half_way(receiver):
        await hand_over(sender, receiver, handoff(4))
        one = handoff(8)
        await one.open(sender, receiver.client.address)
        await receiver.received(one.handoff_id, pb.HANDOFF_STATE_RECEIVING)
        one.fill(sender, [0])
        return one.handoff_id

    handoff_id = await half_way(receiver)
    os.kill(receiver.client.pid, signal.SIGKILL)
    assert (await sender.sent(handoff_id)).state == pb.LocalSendState.STATE_FAILED
    await hand_over(sender, second, handoff(4))
    await sender.empty()

    handoff_id = await half_way(second)
    os.kill(sender.client.pid, signal.SIGKILL)
    await second.received(handoff_id, pb.HANDOFF_STATE_FAILED)
    await hand_over(other, second, handoff(4))
    await asyncio.gather(second.empty(), other.empty())


async def test_reads_by_a_link_that_is_never_joined_end_in_time(start, handoff, layout):
    receiver = await start(transports=["gloo", "grpc"], open_timeout_s=2)
    one = handoff(8)
    async with rpc.channel(receiver.client.address) as channel:
        link = channel.stream_stream(
            link_method("gloo"),
            request_serializer=pb.LinkMessage.SerializeToString,
            response_deserializer=pb.LinkMessage.FromString,
        )()
        hello = pb.LinkHello(
            link_id="never", fingerprint=layout.fingerprint(), segment_bytes=len(one.data)
        )
        await link.write(pb.LinkMessage(hello=hello))
        assert not (await link.read()).hello.refusal
        async with dialled(receiver, layout, one) as raw:
            await raw.send(raw.open(offers=[pb.TransportOffer(name="gloo", link_id="never")]))
            reply = await raw.reply()
            assert (reply.kind, reply.transport) == (pb.HandoffReply.KIND_OPENED, "gloo")
            await raw.send(*raw.references(), *raw.commits())
            reply = await raw.reply()
            assert reply.reason == pb.REFUSAL_REASON_TRANSPORT
            assert "the sender's memory could not be read" in reply.detail
    await receiver.empty()


async def test_a_link_to_a_receiver_without_one_says_why(start, handoff):
    sender, receiver = await asyncio.gather(
        start(transports=["nccl", "gloo", "grpc"]), start(transports=["grpc"])
    )
    sent = await hand_over(sender, receiver, handoff(4))
    reason = ""
    async with asyncio.timeout(120):
        while "not in use at the receiver" not in reason:
            sent = await hand_over(sender, receiver, handoff(4))
            assert sent.transport == "grpc"
            (peer,) = (await sender.empty()).peers
            reason = peer.reason
    assert reason.startswith("nccl: ")
    await receiver.empty()


async def test_a_killed_senders_segment_is_unmapped(start, handoff):
    sender, receiver = await asyncio.gather(start(), start())
    one = handoff(8)
    await one.open(sender, receiver.client.address)
    one.fill(sender, [0])
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_RECEIVING)
    sender.client._process.kill()
    state = await receiver.received(one.handoff_id, pb.HANDOFF_STATE_FAILED)
    assert state.reason == pb.REFUSAL_REASON_INCOMPLETE
    await receiver.empty()
    name = sender.port.description.shm_name
    async with asyncio.timeout(120):
        while name in maps(receiver.client.pid):
            await asyncio.sleep(0.1)


async def test_a_peers_segment_is_unmapped_when_nothing_uses_it(monkeypatch):
    """The stream ends before its pull does."""
    monkeypatch.setattr(shm_transport, "IDLE_TIMEOUT_S", 0.0)
    theirs, own, ended = Segment.create(4096), Segment.create(4096), asyncio.Event()
    theirs.memory[8:12] = b"true"

    class Handler:
        pulls: ClassVar[list[EndedPull]] = []

        def pulls_ended(self, pulls):
            self.pulls += pulls
            ended.set()

    context = ServiceContext(own.name, own.memory)
    (shm,) = registry.make(["shm"], context)
    shm.serve(None, Handler())
    await shm.started()
    offer = shm.offer("")
    try:
        with pytest.raises(TransferError, match="must begin with"):
            shm.accept(1, pb.TransportOffer(shm_domain=offer.shm_domain, shm_segment="../x"))
        missing = f"{SEGMENT_PREFIX}0"
        with pytest.raises(TransferError, match="No such file"):
            shm.accept(1, pb.TransportOffer(shm_domain=offer.shm_domain, shm_segment=missing))
        offer.shm_segment = theirs.name
        assert [shm.accept(stream, offer) for stream in (1, 2)] == [4096, 4096]
        theirs.close()
        shm.end(1)
        shm.pull(Pull(7, 2, 8, 100, 4))
        shm.end(2)
        assert theirs.name in maps(os.getpid())
        await ended.wait()
        assert Handler.pulls == [EndedPull(7, frames.checksum(b"true"))]
        assert own.memory[99:105] == b"\0true\0"
        async with asyncio.timeout(120):
            while theirs.name in maps(os.getpid()):
                await asyncio.sleep(0.01)
    finally:
        await shm.close()
        own.close()


def test_memory_of_another_host_or_user_is_not_shared():
    negotiator = Negotiator(registry.make(["shm", "grpc"], ServiceContext("baton-kv-x")))
    (shm, grpc) = negotiator.offers("host:1", ())
    assert str(os.getuid()) in shm.shm_domain
    shm.shm_domain = "another boot/1/0"
    choice = negotiator.choose(1, pb.HandoffOpen(offers=[shm, grpc]))
    assert (choice.transport, choice.reason) == (
        "grpc",
        "shm: sender and receiver do not share memory",
    )


def test_a_choice_that_was_not_offered_is_not_remembered():
    negotiator = named("shm", "grpc")
    for name in ("", "pigeon"):
        negotiator.opened("host:1", pb.HandoffReply(transport=name), ())
    assert negotiator.peers() == []


class JoiningTransport(NamedTransport):
    """A transport that cannot be offered the first time, and can from then on."""

    def __init__(self, name):
        super().__init__(name)
        self.problems = iter([TransferError("is being joined")])

    def offer(self, target):
        for error in self.problems:
            raise error
        return super().offer(target)


def test_the_reason_is_that_of_the_offer():
    negotiator = Negotiator([JoiningTransport("gloo"), NamedTransport("grpc")])
    offers = negotiator.offers("host:1", ())
    assert [offer.name for offer in offers] == ["grpc"]
    negotiator.opened("host:1", pb.HandoffReply(transport="grpc"), ["grpc"])
    assert [peer.reason for peer in negotiator.peers()] == ["gloo: is being joined"]


def test_every_registered_transport_has_its_class():
    for name in TRANSPORTS:
        assert issubclass(registry.transport_class(name), Transport)


async def test_a_transport_that_cannot_run_here_says_why(monkeypatch):
    monkeypatch.setattr(nccl_transport, "may_have_gpu", lambda: False)
    negotiator = Negotiator(registry.make(["nccl", "grpc"], ServiceContext("baton-kv-x")))
    assert [offer.name for offer in negotiator.offers("host:1", ())] == ["grpc"]
    offers = [pb.TransportOffer(name="nccl"), pb.TransportOffer(name="grpc")]
    choice = negotiator.choose(1, pb.HandoffOpen(offers=offers))
    assert (choice.transport, choice.reason) == ("grpc", "nccl: no GPU here")


class SlowTransport(NamedTransport):
    """A transport that can be offered only once `prepare` has returned."""

    prepared = False

    async def prepare(self, target):
        self.prepared = True

    def offer(self, target):
        if not self.prepared:
            raise TransferError("is being joined")
        return super().offer(target)


async def test_only_a_pair_without_another_transport_waits_for_one():
    alone, beside = SlowTransport("gloo"), SlowTransport("gloo")
    await Negotiator([alone]).ready("host:1")
    await Negotiator([beside, NamedTransport("grpc")]).ready("host:1")
    assert (alone.prepared, beside.prepared) == (True, False)
