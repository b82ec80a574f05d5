"""The sending state machine: only a send's own bytes leave, and all staging is freed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import MAX_TEXT_CHARS, TransferRefused
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.send_state import NotReserved, Reserved, SenderLimits, StopStream
from baton.kvtransfer.service.sender import Sender
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_transports import named

LAYOUT = KvLayout("m", "r", "float32", 3, 1, 8, 4, 128, "heads,tokens,content", tp_size=2)
LIMITS = SenderLimits(max_wait_s=4, reply_grace_s=1, idle_timeout_s=3, linger_s=0.5, max_sends=8)
ARENA_BYTES = LAYOUT.handoff_bytes(4)
A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


class Harness:
    def __init__(self, *transports, layout=LAYOUT):
        self.memory = memoryview(bytearray(ARENA_BYTES))
        self.sender = Sender(Arena(0, ARENA_BYTES), self.memory, LIMITS, named(*transports))
        self.sender.configure(layout)
        self.now = 0.0

    def open(self, handoff_id=A, num_blocks=4, wait_s=2.0):
        return self.sender.open(handoff_id, "host:1", num_blocks, num_blocks * 4, wait_s, self.now)

    def fill(self, shard, layer, *, handoff_id=A, num_blocks=4, last=False, offset=0, stage=0):
        start = offset + LAYOUT.offset(shard, layer, 0, num_blocks)
        size = num_blocks * LAYOUT.block_bytes
        data = bytes([1 + shard * 4 + layer]) * size
        self.memory[start : start + size] = data
        return self.sender.fill(
            pb.LocalFrame(
                handoff_id=handoff_id, shard=shard, layer=layer,
                num_blocks=num_blocks, checksum=frames.checksum(data), last=last, stage=stage,
            ),
            self.now,
        )  # fmt: skip

    def reply(self, kind, *, epoch=1, handoff_id=A, reason=0, transport="", detail="as told"):
        reply = pb.HandoffReply(
            kind=kind, epoch=epoch, reason=reason, detail=detail, transport=transport
        )
        return self.sender.handle_reply(reply, handoff_id, self.now)

    def sent(self, max_bytes=2**20, handoff_id=A):
        found = []
        while batch := self.sender.next_batch(handoff_id, max_bytes, self.now):
            message = b"".join(part for out in batch for part in (out.header, out.payload))
            found += list(frames.decode(message))
        return found

    def assert_empty(self):
        self.sender.check_integrity()
        assert self.sender.arena_statistics().used_bytes == 0
        assert self.sender.next_deadline() is None


@pytest.fixture
def harness():
    return Harness("grpc")


def test_frames_wait_for_the_receiver_and_commit_follows_each_shards_last(harness):
    reserved, *_ = harness.open()
    assert reserved == Reserved(A, 0)
    for layer in range(3):
        harness.fill(0, layer, last=layer == 2)
    assert [frame.kind for frame in harness.sent()] == [FrameKind.OPEN]
    harness.reply(pb.HandoffReply.KIND_OPENED)
    assert [frame.kind for frame in harness.sent()] == [FrameKind.DATA] * 3 + [FrameKind.COMMIT]
    for layer in range(3):
        harness.fill(1, layer, last=layer == 2)
    assert [frame.shard for frame in harness.sent()] == [1] * 4
    harness.now += 0.25
    stop, ended = harness.reply(pb.HandoffReply.KIND_COMMITTED)
    assert stop == StopStream(A)
    assert (ended.handoff_id, ended.epoch, ended.committed) == (A, 1, True)
    assert (ended.num_bytes, ended.num_frames, ended.exposed_s) == (ARENA_BYTES, 6, 0.25)
    assert (ended.transport, ended.num_fallbacks) == ("grpc", 0)
    harness.assert_empty()


@pytest.fixture
def two_stages():
    return Harness("grpc", layout=replace(LAYOUT, pp_size=2))


def test_a_shard_commits_when_all_its_stages_have_ended(two_stages):
    two_stages.open()
    two_stages.sent()
    two_stages.reply(pb.HandoffReply.KIND_OPENED)
    # The second stage holds the last layer.
    two_stages.fill(0, 2, stage=1, last=True)
    two_stages.fill(1, 0)
    two_stages.fill(1, 1, last=True)
    assert [frame.kind for frame in two_stages.sent()] == [FrameKind.DATA] * 3
    two_stages.fill(0, 0)
    two_stages.fill(0, 1, last=True)
    kinds = [(frame.shard, frame.kind) for frame in two_stages.sent()]
    assert kinds == [(0, FrameKind.DATA), (0, FrameKind.DATA), (0, FrameKind.COMMIT)]
    two_stages.fill(1, 2, stage=1, last=True)
    assert [frame.kind for frame in two_stages.sent()] == [FrameKind.DATA, FrameKind.COMMIT]
    _, ended = two_stages.reply(pb.HandoffReply.KIND_COMMITTED)
    assert (ended.committed, ended.num_bytes) == (True, ARENA_BYTES)
    two_stages.assert_empty()


def test_staging_of_a_failed_send_is_kept_until_each_stage_has_ended(two_stages):
    two_stages.open()
    two_stages.sent()
    two_stages.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_FINGERPRINT)
    for shard, stage in [(0, 0), (0, 0), (0, 1), (1, 1), (1, 1)]:
        two_stages.fill(shard, 0, stage=stage, last=True)
        assert two_stages.sender.arena_statistics().used_bytes == ARENA_BYTES
    two_stages.fill(1, 0, last=True)
    two_stages.assert_empty()


@pytest.mark.parametrize(
    ("stages", "detail"),
    [((2,), "stage 2 filled blocks; there are 2 stages"), ((1, 1), "more after its last frame")],
)
def test_wrong_reports_of_a_stage_fail_the_send(two_stages, stages, detail):
    two_stages.open()
    for stage in stages:
        effects = two_stages.fill(0, 0, stage=stage, last=True)
    assert detail in effects[-1].detail


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["fill", "fall back", "send", "open"]), max_size=30))
def test_each_epoch_sends_every_filled_block_from_the_first(steps):
    names = [f"transport-{number}" for number in range(32)]
    harness, epoch, layer = Harness(*names), 1, 0
    harness.open()
    sent = []
    for step in steps:
        if step == "fill" and layer < 3:
            harness.fill(0, layer)
            layer += 1
        elif step == "fall back":
            send = harness.sender._table.sends[A]
            if send.transport:
                reason = pb.REFUSAL_REASON_TRANSPORT
                harness.reply(pb.HandoffReply.KIND_REFUSED, epoch=epoch, reason=reason)
                epoch += 1
        elif step == "open":
            name = names[epoch - 1]
            harness.reply(pb.HandoffReply.KIND_OPENED, epoch=epoch, transport=name)
        else:
            sent += harness.sent(max_bytes=1)
        harness.sender.check_integrity()
    layers: dict[int, list[int]] = {}
    for frame in sent:
        if frame.kind is FrameKind.OPEN:
            assert frame.epoch not in layers
            layers[frame.epoch] = []
        else:
            assert frames.verify(frame)
            layers[frame.epoch].append(frame.layer)
    assert list(layers) == sorted(layers)
    for found in layers.values():
        assert found == list(range(len(found)))


def test_staging_is_given_in_order_and_waiting_is_bounded(harness):
    harness.open(A, 3)
    assert harness.open(B, 2) == []
    assert harness.open(C, 1, wait_s=1.0) == []
    harness.now = 1.0
    assert harness.sender.expire(harness.now) == [
        NotReserved(C, pb.REFUSAL_REASON_NO_ROOM, "no room in the sender's staging")
    ]
    harness.sender.abort(A, harness.now)
    harness.now = 1.5
    effects = harness.sender.expire(harness.now)
    assert effects[0] == Reserved(B, 0)
    harness.sender.abort(B, harness.now)
    harness.now = 2.0
    harness.sender.expire(harness.now)
    harness.assert_empty()


def test_an_impossible_send_is_refused_at_once(harness):
    with pytest.raises(TransferRefused, match="sender's staging has"):
        harness.open(A, 5)
    with pytest.raises(TransferRefused, match="num_tokens"):
        harness.sender.open(A, "host:1", 1, 5, 1.0, 0.0)
    harness.open(A, 1)
    with pytest.raises(TransferRefused, match="being sent already"):
        harness.open(A, 1)


@pytest.mark.parametrize("stage", ["opening", "sending", "committing"])
def test_every_state_has_a_timeout(harness, stage):
    harness.open()
    harness.sent()
    if stage != "opening":
        harness.reply(pb.HandoffReply.KIND_OPENED)
    if stage == "committing":
        for shard in range(2):
            for layer in range(3):
                harness.fill(shard, layer, last=layer == 2)
        harness.sent()
    harness.now = 2.9
    assert harness.sender.expire(harness.now) == []
    harness.now = 3.0
    stop, ended = harness.sender.expire(harness.now)
    assert stop.farewell is not None
    assert (ended.committed, ended.reason) == (False, pb.REFUSAL_REASON_EXPIRED)
    harness.sender.abort(A, harness.now)
    harness.now = 3.5
    harness.sender.expire(harness.now)
    harness.assert_empty()


def test_an_aborted_send_keeps_its_extent_until_all_stages_have_stopped(two_stages):
    """A later stage may write for a step that the first stage has left behind."""
    two_stages.open()
    two_stages.fill(0, 0)
    two_stages.sender.abort(A, two_stages.now)
    assert two_stages.open(B) == []
    two_stages.now = 3 * LIMITS.linger_s
    assert two_stages.sender.expire(two_stages.now) == []
    writers = [(shard, stage) for shard in range(2) for stage in range(2)]
    *others, latest = [
        pb.LocalFrame(handoff_id=A, shard=shard, stage=stage, last=True) for shard, stage in writers
    ]
    for frame in others:
        assert two_stages.sender.fill(frame, two_stages.now) == []
    assert two_stages.sender.fill(latest, two_stages.now)[0] == Reserved(B, 0)


def test_an_aborted_send_of_stages_that_tell_nothing_frees_its_extent(two_stages):
    two_stages.open()
    two_stages.sender.abort(A, two_stages.now)
    two_stages.now = LIMITS.stages_linger_s
    two_stages.sender.expire(two_stages.now)
    two_stages.assert_empty()


@pytest.mark.parametrize("end", ["abort", "last frames", "timeout"])
def test_a_failed_send_keeps_its_extent_until_its_writer_has_stopped(harness, end):
    """The engine is not told of the failure, so it writes until the prompt is computed."""
    harness.open()
    harness.fill(0, 0)
    harness.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_CANCELLED)
    assert harness.open(B) == []
    harness.now = 1.0
    assert harness.sender.expire(harness.now) == []
    assert harness.fill(0, 1) == []
    if end == "abort":
        harness.sender.abort(A, harness.now)
        harness.now += LIMITS.linger_s
        effects = harness.sender.expire(harness.now)
    elif end == "last frames":
        assert harness.fill(0, 2, last=True) == []
        effects = harness.fill(1, 2, last=True)
    else:
        harness.sender.abort(B, harness.now)
        harness.now = LIMITS.writer_timeout_s
        harness.sender.expire(harness.now)
        harness.assert_empty()
        return
    assert effects[0] == Reserved(B, 0)
    harness.sender.check_integrity()


def test_an_aborted_extent_stays_reserved_while_the_engine_may_write(harness):
    harness.open()
    harness.fill(0, 0)
    (stop,) = harness.sender.abort(A, harness.now)
    (frame,) = frames.decode(stop.farewell)
    assert (frame.kind, frame.handoff_id) == (FrameKind.ABORT, A)
    assert harness.sender.num_live == 0
    assert harness.sender.arena_statistics().used_bytes == ARENA_BYTES
    assert harness.fill(0, 1) == []
    harness.now = 0.5
    harness.sender.expire(harness.now)
    harness.assert_empty()


@pytest.mark.parametrize(
    "wrong", [{"shard": 2}, {"layer": 3}, {"first_block": 1}, {"num_blocks": 5}]
)
def test_a_rank_cannot_name_bytes_outside_its_extent(harness, wrong):
    harness.open()
    place = {"shard": 0, "layer": 0, "first_block": 0, "num_blocks": 4, **wrong}
    _, ended = harness.sender.fill(pb.LocalFrame(handoff_id=A, **place), harness.now)
    assert (ended.committed, ended.reason) == (False, pb.REFUSAL_REASON_MALFORMED)


def test_a_refusal_and_a_lost_stream_end_a_send_with_the_reason(harness):
    harness.open(A, 2)
    harness.open(B, 2)
    _, ended = harness.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_FINGERPRINT)
    assert (ended.reason, ended.detail) == (pb.REFUSAL_REASON_FINGERPRINT, "host:1: as told")
    _, ended = harness.sender.handle_stream_lost(B, "UNAVAILABLE", harness.now)
    assert (ended.committed, ended.detail) == (False, "host:1: UNAVAILABLE")


def test_texts_of_a_receiver_are_shortened(harness):
    """A message on the control socket has a limit, beyond which the worker gives the service up."""
    harness.open(A, 2)
    harness.open(B, 2)
    long = "x" * 2**20
    kind, reason = pb.HandoffReply.KIND_REFUSED, pb.REFUSAL_REASON_FINGERPRINT
    _, ended = harness.reply(kind, reason=reason, detail=long)
    assert len(ended.detail) <= MAX_TEXT_CHARS
    harness.sent(handoff_id=B)
    _, ended = harness.reply(pb.HandoffReply.KIND_OPENED, handoff_id=B, transport=long)
    assert len(ended.detail) <= 2 * MAX_TEXT_CHARS


def test_a_reason_that_is_no_reason_is_counted_without_one(harness):
    """Statistics count refusals by numbers that are not negative."""
    harness.open()
    _, ended = harness.reply(pb.HandoffReply.KIND_REFUSED, reason=-1)
    assert ended.reason == pb.REFUSAL_REASON_UNSPECIFIED
    assert harness.sender.statistics.refusals == {pb.REFUSAL_REASON_UNSPECIFIED: 1}


def everything(harness, *, last=True):
    for shard in range(2):
        for layer in range(3):
            harness.fill(shard, layer, last=last and layer == 2)


def offering(*names):
    return Harness(*names)


def opened_by(*names):
    """Returns a harness with a handoff that the receiver has opened on the first transport."""
    harness = offering(*names)
    harness.open()
    harness.sent()
    harness.reply(pb.HandoffReply.KIND_OPENED, transport=names[0])
    return harness


@pytest.mark.parametrize(
    "reason",
    [pb.REFUSAL_REASON_CHECKSUM, pb.REFUSAL_REASON_INCOMPLETE, pb.REFUSAL_REASON_TRANSPORT],
)
def test_a_failed_transport_starts_a_new_epoch_on_the_next_transport(reason):
    harness = offering("shm", "grpc")
    harness.open()
    (opened,) = harness.sent()
    offers = pb.HandoffOpen.FromString(bytes(opened.payload)).offers
    assert [offer.name for offer in offers] == ["shm", "grpc"]
    harness.reply(pb.HandoffReply.KIND_OPENED, transport="shm")
    everything(harness)
    assert {frame.kind for frame in harness.sent()} == {FrameKind.REFERENCE, FrameKind.COMMIT}
    harness.reply(pb.HandoffReply.KIND_REFUSED, reason=reason)
    (opened,) = harness.sent()
    offers = pb.HandoffOpen.FromString(bytes(opened.payload)).offers
    assert (opened.epoch, [offer.name for offer in offers]) == (2, ["grpc"])
    # The same refusal, delayed: it belongs to the older epoch.
    assert harness.reply(pb.HandoffReply.KIND_REFUSED, reason=reason) == []
    harness.reply(pb.HandoffReply.KIND_OPENED, transport="grpc", epoch=2)
    again = harness.sent()
    assert [frame.kind for frame in again].count(FrameKind.DATA) == 6
    assert all(frames.verify(frame) for frame in again)
    _, ended = harness.reply(pb.HandoffReply.KIND_COMMITTED, epoch=2)
    assert (ended.committed, ended.transport, ended.num_fallbacks) == (True, "grpc", 1)
    assert harness.sender.statistics.num_fallbacks == {"shm": 1}
    harness.assert_empty()


def test_without_another_transport_the_send_fails_with_the_first_reason():
    harness = opened_by("grpc")
    everything(harness)
    harness.sent()
    stop, ended = harness.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_CHECKSUM)
    assert next(frames.decode(stop.farewell)).kind is FrameKind.ABORT
    assert (ended.committed, ended.reason) == (False, pb.REFUSAL_REASON_CHECKSUM)
    harness.assert_empty()


@pytest.mark.parametrize("word", ["committed", "refused", "stream lost", "none"])
def test_without_another_transport_a_complete_send_ends_as_the_receiver_says(word):
    harness = opened_by("gloo")
    everything(harness)
    harness.sent()
    if word == "committed":
        _, ended = harness.reply(pb.HandoffReply.KIND_COMMITTED)
    elif word == "refused":
        _, ended = harness.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_TRANSPORT)
    elif word == "stream lost":
        _, ended = harness.sender.handle_stream_lost(A, "gone", harness.now)
    else:
        assert harness.sender.expire(LIMITS.idle_timeout_s - 0.1) == []
        _, ended = harness.sender.expire(LIMITS.idle_timeout_s)
    assert ended.committed == (word == "committed")
    assert ended.transport == "gloo"
    harness.assert_empty()


def test_a_fallback_sends_everything_again():
    harness = opened_by("gloo", "grpc")
    everything(harness)
    harness.sent()
    harness.reply(pb.HandoffReply.KIND_REFUSED, reason=pb.REFUSAL_REASON_TRANSPORT)
    harness.sent()
    harness.reply(pb.HandoffReply.KIND_OPENED, transport="grpc", epoch=2)
    assert harness.reply(pb.HandoffReply.KIND_COMMITTED, epoch=1) == []
    assert len(harness.sent()) == 8
    assert harness.reply(pb.HandoffReply.KIND_COMMITTED, epoch=1) == []
    _, ended = harness.reply(pb.HandoffReply.KIND_COMMITTED, epoch=2)
    assert (ended.committed, ended.epoch, ended.transport) == (True, 2, "grpc")
    harness.assert_empty()


def test_nothing_to_offer_and_a_choice_not_offered_end_the_send():
    harness = offering()
    harness.open()
    with pytest.raises(TransferRefused, match="no transport can be used"):
        harness.sent()
    harness = offering("grpc")
    harness.open()
    harness.sent()
    _, ended = harness.reply(pb.HandoffReply.KIND_OPENED, transport="pigeon")
    assert ended.reason == pb.REFUSAL_REASON_MALFORMED
    assert "'pigeon', which was not offered" in ended.detail


def test_a_send_that_shrinks_is_opened_again_in_its_staging(harness):
    harness.open()
    (first,) = harness.sent()
    harness.reply(pb.HandoffReply.KIND_OPENED)
    offset, _ = harness.sender.shrink(A, 2, 7, harness.now)
    (second,) = harness.sent()
    assert (offset, first.epoch, second.epoch) == (0, 1, 2)
    opened = pb.HandoffOpen.FromString(bytes(second.payload))
    assert (opened.num_blocks, opened.num_tokens) == (2, 7)
    # A late reply to the first open says nothing about the second.
    harness.reply(pb.HandoffReply.KIND_OPENED)
    for shard in range(2):
        for layer in range(3):
            harness.fill(shard, layer, num_blocks=2, last=layer == 2)
    assert harness.sent() == []
    harness.reply(pb.HandoffReply.KIND_OPENED, epoch=2)
    sent = harness.sent()
    assert [frame.num_blocks for frame in sent if frame.kind is FrameKind.DATA] == [2] * 6
    _, ended = harness.reply(pb.HandoffReply.KIND_COMMITTED, epoch=2)
    assert (ended.committed, ended.num_bytes) == (True, LAYOUT.handoff_bytes(2))
    assert ended.num_fallbacks == 0
    harness.assert_empty()


def test_only_a_smaller_send_without_filled_blocks_shrinks(harness):
    def refuses(message, handoff_id=A, num_blocks=2, num_tokens=8):
        with pytest.raises(TransferRefused, match=message):
            harness.sender.shrink(handoff_id, num_blocks, num_tokens, harness.now)

    refuses("is not being sent")
    harness.open(num_blocks=3)
    harness.open(B)
    refuses("is not being sent", B)  # It waits for staging.
    refuses("num_blocks is 0; must be 1 to 3", num_blocks=0)
    refuses("num_blocks is 4; must be 1 to 3", num_blocks=4)
    refuses("num_tokens is 9; must be 1 to 8 for 2 blocks", num_tokens=9)
    harness.fill(0, 0, num_blocks=3)
    refuses("some of its blocks are filled")
    harness.sender.abort(A, harness.now)
    refuses("is not being sent")
