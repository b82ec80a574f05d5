"""The receiving state machine under arbitrary interleavings and a virtual clock."""

from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.service.receive_state import Grant, ReceiveState
from tests.kvtransfer.receiver_harness import (
    LAYOUT,
    Harness,
    honest_messages,
    open_message,
    shard_truth,
)


@dataclass
class Sent:
    """Epoch, size and stream of the last open of one handoff."""

    handoff_id: bytes
    epoch: int
    num_blocks: int
    stream: int


def commit_for(handoff_id, epoch, shard, messages) -> bytes:
    """Returns a commit with the totals of these messages."""
    totals = Totals()
    for message in messages:
        (frame,) = frames.decode(message)
        if frame.shard == shard:
            digest = frames.position_digest(
                shard, frame.layer, frame.first_block, frame.num_blocks, frame.checksum
            )
            totals = totals.plus(len(frame.payload), digest)
    return frames.encode(FrameKind.COMMIT, handoff_id, epoch, totals.encode(), shard=shard)


SPOILS = [
    "nothing", "nothing", "flip", "cut", "lie", "missing", "instead", "early", "late", "foreign",
]  # fmt: skip


class ReceiverMachine(RuleBasedStateMachine):
    """Correct and faulty senders, local clients and time, in any order."""

    def __init__(self):
        super().__init__()
        self.harness = Harness()
        self.known: list[Sent] = []
        self.num_streams = 0
        # Grants that are not released, as (grant, shard).
        self.grants: list[tuple[Grant, int]] = []

    def new_stream(self) -> int:
        self.num_streams += 1
        return self.num_streams

    def pick(self, data) -> Sent:
        """Picks mostly a recent handoff, so that handoffs are likely to complete."""
        return data.draw(st.sampled_from(self.known[-3:] * 4 + self.known))

    @rule(num_blocks=st.integers(1, 5), alien=st.sampled_from([False] * 5 + [True]))
    def opens(self, num_blocks, alien):
        handoff_id = (len(self.known) + 1).to_bytes(16, "big")
        layout = replace(LAYOUT, dtype="other") if alien else LAYOUT
        sent = Sent(handoff_id, 1, num_blocks, self.new_stream())
        self.known.append(sent)
        self.harness.deliver(sent.stream, open_message(handoff_id, 1, num_blocks, layout=layout))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), bump=st.sampled_from([1, 1, 1, 0, -1]), new_stream=st.booleans())
    def reopens(self, data, bump, new_stream):
        sent = self.pick(data)
        stream = self.new_stream() if new_stream else sent.stream
        num_blocks = data.draw(st.sampled_from([sent.num_blocks, sent.num_blocks, 1, 4]))
        epoch = sent.epoch + bump
        if bump == 1:
            sent.epoch, sent.num_blocks, sent.stream = epoch, num_blocks, stream
        if epoch >= 1:
            self.harness.deliver(stream, open_message(sent.handoff_id, epoch, num_blocks))

    @rule(
        data=st.data(),
        fresh=st.booleans(),
        spoil=st.sampled_from(SPOILS),
        order=st.randoms(use_true_random=False),
        loads=st.sampled_from([True, True, False]),
    )
    def completes(self, data, fresh, spoil, order, loads):
        """Sends a whole handoff, perhaps with one fault; then every shard may load it."""
        if fresh or not self.known:
            self.opens(data.draw(st.integers(1, 3)), False)
        sent = self.known[-1] if fresh else self.pick(data)
        handoff_id, epoch, num_blocks = sent.handoff_id, sent.epoch, sent.num_blocks
        messages, commits = honest_messages(handoff_id, epoch, num_blocks)
        order.shuffle(messages)
        victim = data.draw(st.integers(0, len(messages) - 1))
        if spoil in ("flip", "cut"):
            whole = messages[victim]
            at = data.draw(st.integers(0, len(whole) - 1))
            changed = bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
            messages[victim] = whole[:at] + (changed if spoil == "flip" else b"")
        elif spoil == "lie":
            # Another block's bytes, with the place and checksum of this block.
            head, body = frames.HEADER_BYTES, messages[victim - 1][frames.HEADER_BYTES :]
            messages[victim] = messages[victim][:head] + body
        elif spoil in ("missing", "instead"):
            # The commits match the altered messages.
            del messages[victim]
            if spoil == "instead" and messages:
                messages.append(messages[0])
            commits = [commit_for(handoff_id, epoch, shard, messages) for shard in range(2)]
        elif spoil == "early":
            messages.insert(victim, commits.pop(0))
        elif spoil == "late" and epoch > 1:
            messages[victim:victim] = honest_messages(handoff_id, epoch - 1, num_blocks)[0]
        stream = self.new_stream() if spoil == "foreign" else sent.stream
        for message in messages + commits:
            self.harness.deliver(stream, message)
        if loads:
            for shard in range(2):
                self.claim(sent, shard)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), count=st.integers(1, 6), order=st.randoms(use_true_random=False))
    def sends_some(self, data, count, order):
        sent = self.pick(data)
        messages, _ = honest_messages(sent.handoff_id, sent.epoch, sent.num_blocks)
        for message in order.sample(messages, min(count, len(messages))):
            self.harness.deliver(sent.stream, message)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def sends_a_stray(self, data):
        """Sends a frame with a wrong place or a wrong size."""
        sent = self.pick(data)
        shard, layer, first, count = (data.draw(st.integers(0, 5)) for _ in range(4))
        size = data.draw(st.sampled_from([0, 1, 127, 128, 256]))
        in_place = shard < 2 and layer < 2 and count > 0 and first + count <= sent.num_blocks
        if in_place and size == count * LAYOUT.block_bytes:
            size += 1
        stray = frames.encode(
            FrameKind.DATA, sent.handoff_id, sent.epoch, b"x" * size,
            shard=shard, layer=layer, first_block=first, num_blocks=count,
        )  # fmt: skip
        self.harness.deliver(sent.stream, stray)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), foreign=st.booleans())
    def aborts(self, data, foreign):
        sent = self.pick(data)
        stream = self.new_stream() if foreign else sent.stream
        self.harness.deliver(stream, frames.encode(FrameKind.ABORT, sent.handoff_id, sent.epoch))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def loses_stream(self, data):
        harness, stream = self.harness, self.pick(data).stream
        harness.seen(harness.receiver.handle_stream_lost(stream, harness.now))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def drops(self, data):
        harness, sent = self.harness, self.pick(data)
        harness.seen(harness.receiver.drop(sent.handoff_id, harness.now))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), shard=st.integers(0, 2))
    def claims(self, data, shard):
        self.claim(self.pick(data), shard)

    def claim(self, sent, shard):
        harness = self.harness
        try:
            grant, effects = harness.receiver.claim(sent.handoff_id, shard, harness.now)
        except TransferRefused:
            return
        harness.seen(effects)
        self.check(grant, shard)

    def check(self, grant, shard):
        """Checks that a grant covers its part and that the bytes are correct."""
        harness = self.harness
        expected = shard_truth(grant, shard, harness.opened[grant.handoff_id])
        assert harness.bytes_of(grant) == expected
        at = 0
        for frame in grant.frames:
            start = (frame.layer * grant.num_blocks + frame.first_block) * LAYOUT.block_bytes
            assert start == at
            at = start + frame.num_blocks * LAYOUT.block_bytes
            assert frames.checksum(expected[start:at]) == frame.checksum
        assert at == len(expected)
        self.grants.append((grant, shard))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), shard=st.integers(0, 2), all_shards=st.booleans())
    def releases(self, data, shard, all_shards):
        harness, sent = self.harness, self.pick(data)
        harness.seen(
            harness.receiver.release(sent.handoff_id, shard, harness.now, all_shards=all_shards)
        )

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 7.0]))
    def time_passes(self, seconds):
        self.harness.tick(seconds)

    @invariant()
    def intact(self):
        harness = self.harness
        harness.receiver.check_integrity()
        # The staging of a claimed part must not change.
        self.grants = [
            (grant, shard)
            for grant, shard in self.grants
            if harness.states[grant.handoff_id] is ReceiveState.CLAIMED
        ]
        for grant, shard in self.grants:
            expected = shard_truth(grant, shard, harness.opened[grant.handoff_id])
            assert harness.bytes_of(grant) == expected

    def teardown(self):
        for _ in range(20):
            self.harness.tick(10.0)
        self.harness.assert_empty()


ReceiverMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None
)


TestReceiver = ReceiverMachine.TestCase
