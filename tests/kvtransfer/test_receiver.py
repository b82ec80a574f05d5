"""The receiving state machine under arbitrary interleavings and a virtual clock."""

import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.receiving import (
    LONG_HELD_S,
    TRANSITIONS,
    Changed,
    Grant,
    ReceiverLimits,
    ReceiveState,
    Reply,
)
from baton.kvtransfer.service.receiver import Receiver
from baton.v1 import kv_transfer_pb2 as pb

LAYOUT = KvLayout("m", "r", "float32", 2, 1, 8, 4, 128, "heads,tokens,content", tp_size=2)
LIMITS = ReceiverLimits(
    max_wait_s=4, idle_timeout_s=3, commit_ttl_s=6, claim_timeout_s=2, retry_timeout_s=1,
    max_queued=3, max_tombstones=64,
)  # fmt: skip
# Room for four handoffs of one block, or one of four.
ARENA_BYTES = LAYOUT.handoff_bytes(4)
IDS = [bytes([number]) * 16 for number in range(1, 6)]


def truth(handoff_id: bytes, epoch: int, num_blocks: int) -> bytes:
    """The bytes a handoff's sender has: different in every epoch."""
    generator = random.Random(f"{handoff_id.hex()} {epoch} {num_blocks}")
    return generator.randbytes(LAYOUT.handoff_bytes(num_blocks))


def open_message(handoff_id, epoch, num_blocks, *, layout=LAYOUT, wait_ms=2000) -> bytes:
    return frames.encode_open(
        pb.PushOpen(
            handoff_id=handoff_id,
            epoch=epoch,
            fingerprint=layout.fingerprint(),
            num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size_tokens,
            wait_ms=wait_ms,
        )
    )


def data_message(handoff_id, epoch, num_blocks, rank, layer, first, count) -> bytes:
    start = LAYOUT.offset(rank, layer, first, num_blocks)
    payload = truth(handoff_id, epoch, num_blocks)[start : start + count * LAYOUT.block_bytes]
    return frames.encode(
        FrameKind.DATA, handoff_id, epoch, payload,
        rank=rank, layer=layer, first_block=first, num_blocks=count,
    )  # fmt: skip


def honest_messages(handoff_id, epoch, num_blocks) -> tuple[list[bytes], list[bytes]]:
    """Every data frame of a handoff, a block each, and the commits of its ranks."""
    data, commits = [], []
    for rank in range(LAYOUT.tp_size):
        totals = Totals()
        for layer in range(LAYOUT.num_layers):
            for block in range(num_blocks):
                message = data_message(handoff_id, epoch, num_blocks, rank, layer, block, 1)
                (frame,) = frames.decode(message)
                digest = frames.position_digest(rank, layer, block, 1, frame.checksum)
                totals = totals.plus(LAYOUT.block_bytes, digest)
                data.append(message)
        commits.append(
            frames.encode(FrameKind.COMMIT, handoff_id, epoch, totals.encode(), rank=rank)
        )
    return data, commits


class Harness:
    """A receiver with its memory, fed as the transport feeds it."""

    def __init__(self, limits=LIMITS):
        self.memory = memoryview(bytearray(ARENA_BYTES))
        self.receiver = Receiver(Arena(0, ARENA_BYTES), self.memory, limits)
        self.receiver.configure(LAYOUT)
        self.now = 0.0
        self.states: dict[bytes, ReceiveState] = {}
        # The epoch for which each handoff last got its room.
        self.opened: dict[bytes, int] = {}
        # What was granted ahead.
        self.granted: list[Grant] = []

    def deliver(self, stream: int, message: bytes) -> list[Reply]:
        replies: list[Reply] = []
        try:
            for frame in frames.decode(message):
                replies += self.seen(self.receiver.handle_frame(stream, frame, self.now))
        except MalformedFrame as error:
            replies += self.seen(self.receiver.handle_malformed(stream, error, self.now))
        return replies

    def seen(self, effects) -> list[Reply]:
        for effect in effects:
            if isinstance(effect, Changed):
                before = self.states.get(effect.handoff_id)
                if before is not None:
                    assert effect.state in TRANSITIONS[before], (before, effect)
                self.states[effect.handoff_id] = effect.state
                self.granted += effect.grants
            elif effect.kind == pb.PushReply.KIND_OPENED:
                self.opened[effect.handoff_id] = effect.epoch
        return [effect for effect in effects if isinstance(effect, Reply)]

    def send_all(self, stream, handoff_id, epoch, num_blocks, order=None) -> list[Reply]:
        data, commits = honest_messages(handoff_id, epoch, num_blocks)
        if order is not None:
            order.shuffle(data)
        return [reply for message in data + commits for reply in self.deliver(stream, message)]

    def tick(self, seconds: float) -> list[Reply]:
        self.now += seconds
        return self.seen(self.receiver.expire(self.now))

    def bytes_of(self, grant) -> bytes:
        size = LAYOUT.shard_bytes(grant.num_blocks)
        return bytes(self.memory[grant.offset : grant.offset + size])

    def assert_empty(self):
        self.receiver.check_integrity()
        assert self.receiver.num_live == 0
        assert self.receiver.arena_statistics().used_bytes == 0
        assert self.receiver.next_deadline() is None


def rank_truth(grant, rank) -> bytes:
    size = LAYOUT.shard_bytes(grant.num_blocks)
    whole = truth(grant.handoff_id, grant.epoch, grant.num_blocks)
    return whole[rank * size : (rank + 1) * size]


@dataclass
class Sent:
    """What the machine knows of one handoff: epoch, size and stream of its last open."""

    handoff_id: bytes
    epoch: int
    num_blocks: int
    stream: int


def commit_for(handoff_id, epoch, rank, messages) -> bytes:
    """A commit that agrees with whatever messages were sent."""
    totals = Totals()
    for message in messages:
        (frame,) = frames.decode(message)
        if frame.rank == rank:
            digest = frames.position_digest(
                rank, frame.layer, frame.first_block, frame.num_blocks, frame.checksum
            )
            totals = totals.plus(len(frame.payload), digest)
    return frames.encode(FrameKind.COMMIT, handoff_id, epoch, totals.encode(), rank=rank)


SPOILS = [
    "nothing", "nothing", "flip", "cut", "lie", "missing", "instead", "early", "late", "foreign",
]  # fmt: skip


class ReceiverMachine(RuleBasedStateMachine):
    """Honest and hostile senders, local clients and time, in any order."""

    def __init__(self):
        super().__init__()
        self.harness = Harness()
        self.known: list[Sent] = []
        self.num_streams = 0
        # Grants that are not released: (grant, rank).
        self.grants: list[tuple[Grant, int]] = []

    def new_stream(self) -> int:
        self.num_streams += 1
        return self.num_streams

    def pick(self, data) -> Sent:
        """Mostly one of the latest, so that a handoff is likely to get somewhere."""
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
        """Sends the whole handoff, perhaps with one thing wrong; then perhaps every rank loads."""
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
            # The bytes of another block, under this one's place and checksum.
            head, body = frames.HEADER_BYTES, messages[victim - 1][frames.HEADER_BYTES :]
            messages[victim] = messages[victim][:head] + body
        elif spoil in ("missing", "instead"):
            # With commits that agree.
            del messages[victim]
            if spoil == "instead" and messages:
                messages.append(messages[0])
            commits = [commit_for(handoff_id, epoch, rank, messages) for rank in range(2)]
        elif spoil == "early":
            messages.insert(victim, commits.pop(0))
        elif spoil == "late" and epoch > 1:
            messages[victim:victim] = honest_messages(handoff_id, epoch - 1, num_blocks)[0]
        stream = self.new_stream() if spoil == "foreign" else sent.stream
        for message in messages + commits:
            self.harness.deliver(stream, message)
        if loads:
            for rank in range(2):
                self.claim(sent, rank)

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
        """A frame outside the handoff, or of another size than its blocks."""
        sent = self.pick(data)
        rank, layer, first, count = (data.draw(st.integers(0, 5)) for _ in range(4))
        size = data.draw(st.sampled_from([0, 1, 127, 128, 256]))
        in_place = rank < 2 and layer < 2 and count > 0 and first + count <= sent.num_blocks
        if in_place and size == count * LAYOUT.block_bytes:
            size += 1
        stray = frames.encode(
            FrameKind.DATA, sent.handoff_id, sent.epoch, b"x" * size,
            rank=rank, layer=layer, first_block=first, num_blocks=count,
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
    @rule(data=st.data(), rank=st.integers(0, 2))
    def claims(self, data, rank):
        self.claim(self.pick(data), rank)

    def claim(self, sent, rank):
        harness = self.harness
        try:
            grant, effects = harness.receiver.claim(sent.handoff_id, rank, harness.now)
        except TransferRefused:
            return
        harness.seen(effects)
        self.check(grant, rank)

    def check(self, grant, rank):
        """What was granted is all there, and true."""
        harness = self.harness
        assert grant.epoch == harness.opened[grant.handoff_id]
        expected = rank_truth(grant, rank)
        assert harness.bytes_of(grant) == expected
        at = 0
        for frame in grant.frames:
            start = (frame.layer * grant.num_blocks + frame.first_block) * LAYOUT.block_bytes
            assert start == at
            at = start + frame.num_blocks * LAYOUT.block_bytes
            assert frames.checksum(expected[start:at]) == frame.checksum
        assert at == len(expected)
        self.grants.append((grant, rank))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), soon=st.booleans())
    def claims_ahead(self, data, soon):
        """Also before its open, and once it is over."""
        harness = self.harness
        next_id = (len(self.known) + 1).to_bytes(16, "big")
        handoff_id = next_id if soon else self.pick(data).handoff_id
        harness.seen(harness.receiver.claim_ahead(handoff_id, harness.now))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), rank=st.integers(0, 2), all_ranks=st.booleans())
    def releases(self, data, rank, all_ranks):
        harness, sent = self.harness, self.pick(data)
        harness.seen(
            harness.receiver.release(sent.handoff_id, rank, harness.now, all_ranks=all_ranks)
        )

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 7.0]))
    def time_passes(self, seconds):
        self.harness.tick(seconds)

    @invariant()
    def intact(self):
        harness = self.harness
        harness.receiver.check_integrity()
        for at, grant in enumerate(harness.granted):
            if harness.states[grant.handoff_id] is ReceiveState.CLAIMED:
                self.check(grant, at % LAYOUT.tp_size)
        harness.granted.clear()
        # What somebody is loading does not change under them.
        self.grants = [
            (grant, rank)
            for grant, rank in self.grants
            if harness.states[grant.handoff_id] is ReceiveState.CLAIMED
        ]
        for grant, rank in self.grants:
            assert harness.bytes_of(grant) == rank_truth(grant, rank)

    def teardown(self):
        for _ in range(20):
            self.harness.tick(10.0)
        self.harness.assert_empty()


ReceiverMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None
)
TestReceiver = ReceiverMachine.TestCase


def kinds(replies) -> list[tuple[int, int]]:
    return [(reply.kind, reply.reason) for reply in replies]


OPENED = [(pb.PushReply.KIND_OPENED, 0)]


def refused(reason) -> list[tuple[int, int]]:
    return [(pb.PushReply.KIND_REFUSED, reason)]


@pytest.fixture
def harness():
    return Harness()


def test_a_whole_handoff_is_loaded_rank_by_rank_in_any_order(harness):
    assert kinds(harness.deliver(1, open_message(IDS[0], 1, 3))) == OPENED
    replies = harness.send_all(1, IDS[0], 1, 3, order=random.Random(1))
    assert kinds(replies) == [(pb.PushReply.KIND_COMMITTED, 0)]
    for rank in range(2):
        grant, _ = harness.receiver.claim(IDS[0], rank, harness.now)
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
        harness.receiver.release(IDS[0], rank, harness.now)
    harness.assert_empty()
    late = data_message(IDS[0], 1, 3, 0, 0, 0, 1)
    assert kinds(harness.deliver(1, late)) == refused(pb.REFUSAL_REASON_UNKNOWN_HANDOFF)


def test_each_wrong_frame_has_its_reason(harness):
    def after(*messages, opened=True):
        one = Harness()
        if opened:
            one.deliver(1, open_message(IDS[0], 2, 3))
        replies = [reply for message in messages for reply in one.deliver(1, message)]
        with pytest.raises(TransferRefused):
            one.receiver.claim(IDS[0], 0, one.now)
        # One that was interrupted waits for its next epoch.
        one.seen(one.receiver.handle_stream_lost(1, one.now))
        one.assert_empty()
        return kinds(replies)

    good = data_message(IDS[0], 2, 3, 0, 0, 0, 1)
    flipped = bytearray(good)
    flipped[-1] ^= 1
    header = bytearray(good)
    header[20] ^= 1
    _, commits = honest_messages(IDS[0], 2, 3)
    checksum, malformed = pb.REFUSAL_REASON_CHECKSUM, pb.REFUSAL_REASON_MALFORMED
    unknown = pb.REFUSAL_REASON_UNKNOWN_HANDOFF
    assert after(bytes(flipped)) == refused(checksum)
    assert after(bytes(header)) == refused(checksum)
    assert after(good[:-1]) == refused(malformed)
    assert after(b"not a frame") == refused(malformed)
    assert after(good, good) == refused(malformed)
    assert after(good, commits[0]) == refused(pb.REFUSAL_REASON_INCOMPLETE)
    assert after(good, opened=False) == refused(unknown)
    assert after(open_message(IDS[0], 2, 3)) == refused(malformed)
    for place in ((2, 0, 0, 1), (0, 2, 0, 1), (0, 0, 3, 1), (0, 0, 2, 2), (0, 0, 0, 0)):
        rank, layer, first, count = place
        stray = frames.encode(
            FrameKind.DATA, IDS[0], 2, b"x" * count * 128,
            rank=rank, layer=layer, first_block=first, num_blocks=count,
        )  # fmt: skip
        assert after(stray) == refused(malformed), place


def test_frames_for_others_and_of_older_epochs_harm_nobody(harness):
    harness.deliver(1, open_message(IDS[0], 2, 2))
    foreign = data_message(IDS[0], 2, 2, 0, 0, 0, 1)
    assert kinds(harness.deliver(9, foreign)) == refused(pb.REFUSAL_REASON_UNKNOWN_HANDOFF)
    old = data_message(IDS[0], 1, 2, 0, 0, 0, 1)
    assert kinds(harness.deliver(1, old)) == refused(pb.REFUSAL_REASON_OLD_EPOCH)
    assert kinds(harness.deliver(9, open_message(IDS[0], 1, 2))) == refused(
        pb.REFUSAL_REASON_OLD_EPOCH
    )
    assert kinds(harness.send_all(1, IDS[0], 2, 2)) == [(pb.PushReply.KIND_COMMITTED, 0)]
    grant, _ = harness.receiver.claim(IDS[0], 1, harness.now)
    assert harness.bytes_of(grant) == rank_truth(grant, 1)


def test_a_newer_epoch_voids_the_older_one_and_keeps_its_space(harness):
    harness.deliver(1, open_message(IDS[0], 1, 4))
    data, commits = honest_messages(IDS[0], 1, 4)
    for message in data:
        harness.deliver(1, message)
    assert kinds(harness.deliver(1, open_message(IDS[0], 2, 4))) == OPENED
    for message in commits:
        assert kinds(harness.deliver(1, message)) == refused(pb.REFUSAL_REASON_OLD_EPOCH)
    with pytest.raises(TransferRefused, match="RECEIVING"):
        harness.receiver.claim(IDS[0], 0, harness.now)
    harness.send_all(1, IDS[0], 2, 4)
    grant, _ = harness.receiver.claim(IDS[0], 0, harness.now)
    assert (grant.epoch, harness.bytes_of(grant)) == (2, rank_truth(grant, 0))


def test_room_is_given_in_order_and_the_large_one_is_not_overtaken(harness):
    assert kinds(harness.deliver(1, open_message(IDS[0], 1, 3))) == OPENED
    assert harness.deliver(2, open_message(IDS[1], 1, 4)) == []
    assert harness.deliver(3, open_message(IDS[2], 1, 1)) == []
    assert harness.states[IDS[1]] is ReceiveState.QUEUED
    replies = harness.seen(harness.receiver.drop(IDS[0], harness.now))
    assert [(reply.stream, reply.kind) for reply in replies] == [
        (1, pb.PushReply.KIND_REFUSED),
        (2, pb.PushReply.KIND_OPENED),
    ]
    replies = harness.tick(2.0)
    assert [(reply.stream, reply.reason) for reply in replies] == [(3, pb.REFUSAL_REASON_NO_ROOM)]


def test_what_can_never_fit_or_does_not_match_is_refused_in_words(harness):
    (reply,) = harness.deliver(1, open_message(IDS[0], 1, 5))
    assert reply.reason == pb.REFUSAL_REASON_TOO_LARGE
    assert str(LAYOUT.handoff_bytes(5)) in reply.detail
    other = KvLayout("m", "r", "bfloat16", 2, 1, 8, 4, 128, "heads,tokens,content", tp_size=2)
    (reply,) = harness.deliver(2, open_message(IDS[1], 1, 1, layout=other))
    assert reply.reason == pb.REFUSAL_REASON_FINGERPRINT
    assert "dtype is 'bfloat16', here 'float32'" in reply.detail
    assert harness.states[IDS[1]] is ReceiveState.FAILED


@pytest.mark.parametrize("stage", ["queued", "receiving", "committed", "claimed"])
def test_every_state_has_a_timed_exit(harness, stage):
    if stage == "queued":
        harness.deliver(9, open_message(IDS[4], 1, 4))
    harness.deliver(1, open_message(IDS[0], 1, 2, wait_ms=1000))
    if stage in ("committed", "claimed"):
        harness.send_all(1, IDS[0], 1, 2)
    if stage == "claimed":
        harness.seen(harness.receiver.claim(IDS[0], 0, harness.now)[1])
    assert harness.states[IDS[0]].name == stage.upper()
    limit_s = {"queued": 1.0, "receiving": 3.0, "committed": 6.0, "claimed": 2.0}[stage]
    harness.tick(limit_s - 0.1)
    assert harness.states[IDS[0]].name == stage.upper()
    harness.tick(0.1)
    assert harness.states[IDS[0]] is ReceiveState.FAILED
    harness.tick(10)
    harness.assert_empty()


@pytest.mark.parametrize("stage", ["unopened", "queued", "receiving", "committed"])
def test_a_drop_at_any_stage_frees_it_and_refuses_what_comes_later(harness, stage):
    if stage == "queued":
        harness.deliver(9, open_message(IDS[4], 1, 4))
    if stage != "unopened":
        harness.deliver(1, open_message(IDS[0], 1, 2))
    if stage == "committed":
        harness.send_all(1, IDS[0], 1, 2)
    harness.seen(harness.receiver.drop(IDS[0], harness.now))
    harness.seen(harness.receiver.drop(IDS[4], harness.now))
    harness.assert_empty()
    again = harness.deliver(2, open_message(IDS[0], 2, 2))
    assert kinds(again) == refused(pb.REFUSAL_REASON_CANCELLED)


def test_a_drop_does_not_take_staging_from_who_reads_it(harness):
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    grant, _ = harness.receiver.claim(IDS[0], 0, harness.now)
    harness.receiver.drop(IDS[0], harness.now)
    assert harness.bytes_of(grant) == rank_truth(grant, 0)
    harness.receiver.release(IDS[0], 0, harness.now, all_ranks=True)
    harness.assert_empty()


@pytest.mark.parametrize("stage", ["unopened", "receiving", "committed", "claimed"])
@pytest.mark.parametrize("why", [pb.REFUSAL_REASON_CANCELLED, pb.REFUSAL_REASON_EXPIRED])
def test_what_its_reader_gives_back_unloaded_has_failed(harness, stage, why):
    handoff_id, receiver = IDS[0], harness.receiver
    if stage == "claimed":
        receiver.claim_ahead(handoff_id, harness.now)
    if stage != "unopened":
        harness.deliver(1, open_message(handoff_id, 1, 2))
    if stage in ("committed", "claimed"):
        harness.send_all(1, handoff_id, 1, 2)
    for not_loaded in (why, pb.REFUSAL_REASON_UNSPECIFIED):
        harness.seen(
            receiver.release(handoff_id, 0, harness.now, all_ranks=True, not_loaded=not_loaded)
        )
    (ended,) = receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, why)
    assert receiver.statistics.num_expired == (
        why == pb.REFUSAL_REASON_EXPIRED and stage != "unopened"
    )
    harness.assert_empty()
    assert kinds(harness.deliver(2, open_message(handoff_id, 2, 2))) == refused(why)


@pytest.mark.parametrize("when", ["before its open", "while it comes", "once it is committed"])
def test_what_is_claimed_ahead_is_granted_with_the_commit_and_not_taken_away(harness, when):
    handoff_id, receiver = IDS[0], harness.receiver
    if when == "before its open":
        assert receiver.claim_ahead(handoff_id, harness.now) == []
    harness.deliver(1, open_message(handoff_id, 1, 2))
    if when == "while it comes":
        assert receiver.claim_ahead(handoff_id, harness.now) == []
    harness.send_all(1, handoff_id, 1, 2)
    if when == "once it is committed":
        assert not harness.granted
        harness.seen(receiver.claim_ahead(handoff_id, harness.now))
    assert harness.states[handoff_id] is ReceiveState.CLAIMED
    for rank, grant in enumerate(harness.granted):
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
    # A late cancel, and another epoch.
    receiver.drop(handoff_id, harness.now)
    assert kinds(harness.deliver(2, open_message(handoff_id, 2, 2))) == refused(
        pb.REFUSAL_REASON_UNKNOWN_HANDOFF
    )
    # As long as a commit may wait, not as short as a load.
    harness.tick(LIMITS.commit_ttl_s - 1)
    for rank, grant in enumerate(harness.granted):
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
        harness.seen(receiver.release(handoff_id, rank, harness.now))
    harness.assert_empty()
    assert receiver.claim_ahead(handoff_id, harness.now) == []


def test_what_is_claimed_ahead_and_never_read_expires(harness):
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LIMITS.commit_ttl_s)
    harness.assert_empty()


def test_what_is_claimed_ahead_lasts_for_a_load_however_soon_commits_expire():
    """A load that begins at once says nothing: it is read until it is released."""
    harness = Harness(limits=replace(LIMITS, commit_ttl_s=0.5))
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LONG_HELD_S + LIMITS.claim_timeout_s - 0.1)
    assert harness.states[IDS[0]] is ReceiveState.CLAIMED
    harness.tick(0.1)
    harness.assert_empty()


def test_what_is_claimed_ahead_lasts_for_a_load_from_when_that_begins(harness):
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    harness.tick(LIMITS.commit_ttl_s - 0.5)
    assert harness.receiver.claim_ahead(IDS[0], harness.now) == []
    harness.tick(LIMITS.claim_timeout_s - 0.5)
    assert harness.states[IDS[0]] is ReceiveState.CLAIMED
    harness.tick(0.5)
    assert harness.states[IDS[0]] is ReceiveState.FAILED
    harness.assert_empty()


def test_what_has_too_many_frames_to_be_told_at_once_is_claimed_rank_by_rank():
    harness = Harness(replace(LIMITS, max_frames_ahead=7))
    harness.receiver.claim_ahead(IDS[0], harness.now)
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    assert harness.receiver.claim_ahead(IDS[0], harness.now) == []
    assert harness.states[IDS[0]] is ReceiveState.COMMITTED
    for rank in range(2):
        grant, effects = harness.receiver.claim(IDS[0], rank, harness.now)
        harness.seen(effects)
        assert harness.bytes_of(grant) == rank_truth(grant, rank)
        harness.seen(harness.receiver.release(IDS[0], rank, harness.now))
    harness.assert_empty()


def test_claims_ahead_are_bounded(harness):
    for number in range(2 * LIMITS.max_tombstones):
        harness.receiver.claim_ahead(number.to_bytes(16, "big"), harness.now)
    harness.receiver.check_integrity()


def test_a_lost_stream_ends_its_handoff_before_the_commit_only(harness):
    harness.deliver(1, open_message(IDS[0], 1, 1))
    harness.deliver(2, open_message(IDS[1], 1, 1))
    harness.send_all(2, IDS[1], 1, 1)
    for stream in (1, 2):
        harness.seen(harness.receiver.handle_stream_lost(stream, harness.now))
    assert harness.states[IDS[0]] is ReceiveState.FAILED
    assert harness.states[IDS[1]] is ReceiveState.COMMITTED


def test_tombstones_are_bounded(harness):
    for number in range(200):
        harness.receiver.drop(number.to_bytes(16, "big"), harness.now)
    assert len(list(harness.receiver.known())) == LIMITS.max_tombstones


def test_a_peek_shows_what_has_come_and_takes_nothing():
    harness, stream, handoff_id = Harness(), 1, IDS[0]
    with pytest.raises(TransferRefused, match="not known"):
        harness.receiver.peek(handoff_id, 0, 0, 0)
    harness.deliver(stream, open_message(handoff_id, 1, 2))
    data, commits = honest_messages(handoff_id, 1, 2)
    ours = [message for message in data if next(iter(frames.decode(message))).rank == 0]
    for message in ours[:3]:
        harness.deliver(stream, message)
    seen = harness.receiver.peek(handoff_id, 0, 0, 0)
    assert [(frame.layer, frame.first_block) for frame in seen.frames] == [(0, 0), (0, 1), (1, 0)]
    assert harness.receiver.peek(handoff_id, 0, 1, 3).frames == ()
    assert harness.receiver.peek(handoff_id, 1, 1, 0).frames == ()
    with pytest.raises(TransferRefused, match="rank 2"):
        harness.receiver.peek(handoff_id, 2, 1, 0)
    for message in data + commits:
        if message not in ours[:3]:
            harness.deliver(stream, message)
    assert harness.states[handoff_id] is ReceiveState.COMMITTED
    rest = harness.receiver.peek(handoff_id, 0, 1, 3)
    assert [(frame.layer, frame.first_block) for frame in rest.frames] == [(1, 1)]
    # All of it where another epoch was seen before.
    assert len(harness.receiver.peek(handoff_id, 0, 2, 3).frames) == 4
    grant, _ = harness.receiver.claim(handoff_id, 0, harness.now)
    assert (grant.offset, grant.epoch) == (seen.offset, seen.epoch)
    assert set(grant.frames) == {*seen.frames, *rest.frames}


@pytest.mark.parametrize(
    ("progress_blocks", "expected"), [(3, [3, 6, 9, 12, 14, 15]), (100, [8, 12, 14, 15])]
)
def test_subscribers_hear_of_the_progress_of_handoffs(progress_blocks, expected):
    limits = replace(LIMITS, progress_bytes=progress_blocks * LAYOUT.block_bytes)
    harness, told = Harness(limits), []
    harness.deliver(1, open_message(IDS[0], 1, 4))
    data, _ = honest_messages(IDS[0], 1, 4)
    for message in data:
        (frame,) = frames.decode(message)
        told += harness.receiver.handle_frame(1, frame, harness.now)
    assert [change.num_bytes_received // LAYOUT.block_bytes for change in told] == expected
    assert {change.state for change in told} == {ReceiveState.RECEIVING}
