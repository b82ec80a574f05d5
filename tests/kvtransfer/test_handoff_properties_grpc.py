"""Real services over real gRPC, with a relay in between that applies planned faults to frames.

Every handoff delivers the bytes that the prefill wrote last, or fails at both ends within the
configured times. In the end the services hold nothing.
"""

import asyncio
import contextlib
import os
import signal
from collections import deque
from dataclasses import dataclass

import grpc
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD, HANDOFF_NAME, SERVICE
from baton.runtime.network import rpc
from baton.v1 import kv_transfer_pb2 as pb

COMMITTED, FAILED = pb.LocalSendState.STATE_COMMITTED, pb.LocalSendState.STATE_FAILED
TIMES = {"open_timeout_s": 2.0, "idle_timeout_s": 2.0, "commit_ttl_s": 5.0, "claim_timeout_s": 1.0}
# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0


@dataclass(frozen=True)
class Plan:
    """The faults of one handoff.

    Attributes:
        num_blocks: Size of the handoff.
        frames: Fault of each frame from sender to receiver, by the frame's number.
        replies: Fault of each reply, by the reply's number.
        story: Actions of the workers, one of STORIES.
    """

    num_blocks: int
    frames: dict[int, str]
    replies: dict[int, str]
    story: str


FAULTS = ["drop", "duplicate", "swap", "flip header", "flip payload", "cut short", "hold", "cut"]
STORIES = ["all is filled"] * 8 + ["aborts", "is dropped", "half is filled", "no load"]
PLANS = st.builds(
    Plan,
    num_blocks=st.integers(1, 6),
    frames=st.dictionaries(st.integers(0, 12), st.sampled_from(FAULTS), max_size=2),
    replies=st.dictionaries(
        st.integers(0, 2), st.sampled_from(["drop", "duplicate", "hold"]), max_size=1
    ),
    story=st.sampled_from(STORIES),
)
# Reasons of a handoff that a slow machine let time out.
TIMED_OUT = (
    pb.REFUSAL_REASON_EXPIRED,
    pb.REFUSAL_REASON_NO_ROOM,
    pb.REFUSAL_REASON_UNKNOWN_HANDOFF,
)
AS_IT_IS = Plan(6, {}, {}, "all is filled")


class Relay:
    """Stands between every sender and one receiver, and forwards streams frame by frame.

    Attributes:
        target: The receiver's address; may change.
        plans: Plans by handoff ID; a handoff without a plan has no faults.
    """

    def __init__(self, target):
        self.target, self.plans, self.num_passed = target, {}, 0
        self._channels = {}
        self._event = asyncio.Event()
        self._server = rpc.server(max_message_bytes=rpc.MAX_FRAME_BYTES)
        handler = grpc.stream_stream_rpc_method_handler(self._forward)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {HANDOFF_NAME: handler}),)
        )
        self.address = rpc.bind(self._server, "127.0.0.1:0", "relay")

    async def __aenter__(self):
        await self._server.start()
        return self

    async def __aexit__(self, *error):
        await self._server.stop(0)
        for channel in self._channels.values():
            await channel.close()

    def something_happened(self):
        """Releases every frame and reply that is held back."""
        self._event.set()
        self._event = asyncio.Event()

    async def passed(self, num_frames):
        while self.num_passed < num_frames:
            await self._event.wait()

    async def _forward(self, messages, context):
        if self.target not in self._channels:
            self._channels[self.target] = rpc.channel(
                self.target, max_message_bytes=rpc.MAX_FRAME_BYTES
            )
        call = self._channels[self.target].stream_stream(HANDOFF_METHOD)()
        opened, was_cut = asyncio.get_running_loop().create_future(), asyncio.Event()
        upward = asyncio.create_task(self._pass_up(messages, call, opened, was_cut))
        try:
            plan, number = None, 0
            async for reply in call:
                plan = plan or await opened
                fault = plan.replies.get(number)
                number += 1
                if fault == "hold":
                    await self._event.wait()
                for _ in range({"drop": 0, "duplicate": 2}.get(fault, 1)):
                    await context.write(reply)
        except grpc.aio.AioRpcError as error:
            await context.abort(error.code(), error.details())
        except asyncio.CancelledError:
            if not was_cut.is_set():
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
        finally:
            upward.cancel()
            call.cancel()
            await asyncio.wait([upward])

    async def _pass_up(self, messages, call, opened, was_cut):
        """Forwards frames until either side ends the call."""
        number, later = 0, deque()
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            async for message in messages:
                for frame in split(message):
                    if not opened.done():
                        (first,) = frames.decode(frame)
                        opened.set_result(self.plans.get(first.handoff_id, AS_IT_IS))
                    fault = opened.result().frames.get(number)
                    number += 1
                    if fault == "cut":
                        was_cut.set()
                        call.cancel()
                        return
                    if fault == "hold":
                        await self._event.wait()
                    if fault == "swap":
                        later.append(frame)
                        continue
                    for each in (*spoiled(frame, fault), *later):
                        await call.write(each)
                    later.clear()
                    self.num_passed += 1
                    self.something_happened()
            await call.done_writing()


def split(message):
    """Yields the frames of a message, each as bytes."""
    begin = 0
    for frame in frames.decode(message):
        end = begin + frames.HEADER_BYTES + len(frame.payload)
        yield message[begin:end]
        begin = end


def spoiled(frame, fault):
    match fault:
        case "drop":
            return []
        case "duplicate":
            return [frame, frame]
        case "flip header":
            return [flipped(frame, 20)]
        case "flip payload":
            # The payload of a reference is an offset, so it then points to other bytes.
            return [flipped(frame, min(frames.HEADER_BYTES + 1, len(frame) - 1))]
        case "cut short":
            return [frame[:-3]]
    return [frame]


def flipped(data, at):
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


class Network:
    """Senders, one receiver and the relay between them; collects every end of a handoff."""

    def __init__(self, relay, start, receiver, senders):
        self.relay, self.start, self.receiver, self.senders = relay, start, receiver, senders
        self.handoffs, self.committed, self.loaded = {}, set(), set()

    async def hand_over(self, sender, one, plan):
        """Runs one plan until the send has ended."""
        self.handoffs[one.handoff_id] = one, plan
        self.relay.plans[one.handoff_id] = plan
        try:
            await one.open(sender, self.relay.address)
        except TransferRefused:
            return None
        one.fill(sender, range(2 if plan.story in ("half is filled", "aborts") else 3))
        if plan.story == "aborts":
            sender.client.abort_send(one.handoff_id)
            return None
        if plan.story == "is dropped":
            self.receiver.client.drop(one.handoff_id)
        return await self.ended(sender, one)

    async def ended(self, sender, one):
        while one.handoff_id not in sender.sends:
            await self._heard.wait()
        return sender.sends[one.handoff_id]

    async def play(self, plans):
        """Runs all plans at once; returns how each send ended, None without a report."""
        self._heard = asyncio.Event()
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            listeners = [group.create_task(self._listen(one)) for one in self.senders]
            listeners.append(group.create_task(self._load()))
            sends = [group.create_task(self.hand_over(*each)) for each in plans]
            await asyncio.wait(sends)
            await asyncio.gather(*(each.empty(may_expire=True) for each in self.workers))
            for listener in listeners:
                listener.cancel()
        return [send.result() for send in sends]

    async def commit_one(self, sender, handoff):
        """Hands over without faults; again when a slow machine let a short timeout pass."""
        while True:
            one = handoff(6)
            (sent,) = await self.play([(sender, one, AS_IT_IS)])
            if sent is not None and sent.state == COMMITTED:
                break
            assert sent is None or sent.reason in TIMED_OUT, sent
        assert one.handoff_id in self.loaded

    @property
    def workers(self):
        return [*self.senders, self.receiver]

    async def replace(self, killed):
        """Starts another service in place of a killed one."""
        started = await self.start()
        if killed is self.receiver:
            self.receiver, self.relay.target = started, started.client.address
        else:
            self.senders[self.senders.index(killed)] = started

    async def _listen(self, sender):
        while True:
            for event in await sender.client.next_events():
                if isinstance(event, pb.LocalSendState):
                    assert event.handoff_id not in sender.sends, "told twice"
                    sender.sends[event.handoff_id] = event
                    if event.state == FAILED:
                        sender.client.abort_send(event.handoff_id)
            self.relay.something_happened()
            self._heard.set()
            self._heard = asyncio.Event()

    async def _load(self):
        """Loads every committed handoff and checks its bytes."""
        while True:
            for event in await self.receiver.client.next_events():
                one, plan = self.handoffs[event.handoff_id]
                if event.state != pb.HANDOFF_STATE_COMMITTED:
                    continue
                self.committed.add(event.handoff_id)
                if plan.story != "no load":
                    loaded = one.load(self.receiver)
                    if loaded is not None:
                        assert loaded == one.data, plan
                        self.loaded.add(event.handoff_id)


SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
async def network(start, layout, request):
    """Two senders, and a receiver with room for a few handoffs at a time."""
    times = getattr(request, "param", TIMES)
    configs = [
        {"receive_bytes": layout.handoff_bytes(20)},
        {"transports": ["grpc"]},
        {"transports": ["shm", "grpc"], "send_bytes": layout.handoff_bytes(30)},
    ]
    receiver, *senders = await asyncio.gather(*(start(**times, **each) for each in configs))
    async with Relay(receiver.client.address) as relay:
        yield Network(relay, lambda: start(**times), receiver, senders)


@settings(SETTINGS, max_examples=3)
@given(plans=st.lists(st.tuples(st.integers(0, 1), PLANS), min_size=24, max_size=32))
async def test_planned_faults(network, handoff, plans):
    plays = [(network.senders[sender], handoff(plan.num_blocks), plan) for sender, plan in plans]
    for (_, one, _), sent in zip(plays, await network.play(plays), strict=True):
        if sent is not None and sent.state == COMMITTED:
            assert one.handoff_id in network.committed
    for sender in network.senders:
        await network.commit_one(sender, handoff)


@settings(SETTINGS, max_examples=3)
@given(
    victim=st.sampled_from(["receiver", "sender"]),
    after=st.integers(1, 30),
    sizes=st.lists(st.integers(1, 3), min_size=6, max_size=8),
)
async def test_a_killed_service_and_its_successor(network, handoff, victim, after, sizes):
    """The other end then holds nothing, and hands over with the new service."""
    sender, receiver = network.senders[1], network.receiver
    handoffs = [handoff(size) for size in sizes]
    killed_at = network.relay.num_passed + after
    async with asyncio.timeout(WAIT_S):
        for one in handoffs:
            network.handoffs[one.handoff_id] = one, AS_IT_IS
            await one.open(sender, network.relay.address)
        for one in handoffs:
            one.fill(sender)
        await network.relay.passed(killed_at)
        killed = receiver if victim == "receiver" else sender
        os.kill(killed.client.pid, signal.SIGKILL)
        await killed.client.gone.wait()
        for one in handoffs:
            if victim == "receiver":
                await sender.sent(one.handoff_id)
            elif (loaded := one.load(receiver)) is not None:
                assert loaded == one.data
        twin = sender if victim == "receiver" else receiver
        await twin.empty(may_expire=True)
    await network.replace(killed)
    await network.commit_one(network.senders[1], handoff)


# Without short times: a slow machine must not turn the fallback into an expiry.
@pytest.mark.parametrize("network", [{}], indirect=True, ids=[""])
@pytest.mark.parametrize("fault", ["flip payload", "drop"])
async def test_a_handoff_that_shared_memory_spoils_falls_back_to_grpc(network, handoff, fault):
    sender, one = network.senders[1], handoff(6)
    # The fault hits the first reference; the frames of the next epoch have no faults.
    (sent,) = await network.play([(sender, one, Plan(6, {1: fault}, {}, "all is filled"))])
    assert (sent.state, sent.transport, sent.epoch) == (COMMITTED, "grpc", 2)
    assert sent.num_fallbacks == 1
    assert one.handoff_id in network.loaded
    moved = {each.name: each for each in (await sender.client.stats()).transports}
    assert (moved["shm"].fallbacks, moved["grpc"].handoffs_committed) == (1, 1)
    (peer,) = (await sender.client.stats()).peers
    assert (peer.transport, peer.reason) == ("grpc", "shm: failed")
