"""A receiver: loads, refusals with their messages, timeouts, drops."""

import random
from dataclasses import replace

import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.receive_state import ReceiveState
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.receiver_harness import (
    IDS,
    LAYOUT,
    LIMITS,
    OPENED,
    Harness,
    data_message,
    drafted,
    honest_messages,
    kinds,
    open_message,
    refused,
    shard_truth,
)


@pytest.fixture
def harness():
    return Harness()


def test_a_whole_handoff_is_loaded_rank_by_rank_in_any_order(harness):
    assert kinds(harness.deliver(1, open_message(IDS[0], 1, 3))) == OPENED
    replies = harness.send_all(1, IDS[0], 1, 3, order=random.Random(1))
    assert kinds(replies) == [(pb.HandoffReply.KIND_COMMITTED, 0)]
    for shard in range(2):
        grant, _ = harness.receiver.claim(IDS[0], shard, harness.now)
        assert harness.bytes_of(grant) == shard_truth(grant, shard)
        harness.receiver.release(IDS[0], shard, harness.now)
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
        # An interrupted handoff waits for its next epoch, so its stream is ended.
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
        shard, layer, first, count = place
        stray = frames.encode(
            FrameKind.DATA, IDS[0], 2, b"x" * count * 128,
            shard=shard, layer=layer, first_block=first, num_blocks=count,
        )  # fmt: skip
        assert after(stray) == refused(malformed), place


def test_frames_of_other_streams_and_older_epochs_change_nothing(harness):
    harness.deliver(1, open_message(IDS[0], 2, 2))
    foreign = data_message(IDS[0], 2, 2, 0, 0, 0, 1)
    assert kinds(harness.deliver(9, foreign)) == refused(pb.REFUSAL_REASON_UNKNOWN_HANDOFF)
    old = data_message(IDS[0], 1, 2, 0, 0, 0, 1)
    assert kinds(harness.deliver(1, old)) == refused(pb.REFUSAL_REASON_OLD_EPOCH)
    assert kinds(harness.deliver(9, open_message(IDS[0], 1, 2))) == refused(
        pb.REFUSAL_REASON_OLD_EPOCH
    )
    assert kinds(harness.send_all(1, IDS[0], 2, 2)) == [(pb.HandoffReply.KIND_COMMITTED, 0)]
    grant, _ = harness.receiver.claim(IDS[0], 1, harness.now)
    assert harness.bytes_of(grant) == shard_truth(grant, 1, epoch=2)


def test_a_newer_epoch_drops_the_older_one_and_keeps_its_staging(harness):
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
    assert harness.bytes_of(grant) == shard_truth(grant, 0, epoch=2)


def test_staging_is_given_in_order_and_a_large_handoff_is_not_overtaken(harness):
    assert kinds(harness.deliver(1, open_message(IDS[0], 1, 3))) == OPENED
    assert harness.deliver(2, open_message(IDS[1], 1, 4)) == []
    assert harness.deliver(3, open_message(IDS[2], 1, 1)) == []
    assert harness.states[IDS[1]] is ReceiveState.QUEUED
    replies = harness.seen(harness.receiver.drop(IDS[0], harness.now))
    assert [(reply.stream, reply.kind) for reply in replies] == [
        (1, pb.HandoffReply.KIND_REFUSED),
        (2, pb.HandoffReply.KIND_OPENED),
    ]
    replies = harness.tick(2.0)
    assert [(reply.stream, reply.reason) for reply in replies] == [(3, pb.REFUSAL_REASON_NO_ROOM)]


def test_only_handoffs_with_staging_take_memory_for_their_blocks(harness):
    """The sender chooses the number of blocks, and many handoffs may wait for staging."""
    for number in range(3):
        harness.deliver(number, open_message(IDS[number], 1, 4))
    # One byte for each block of both layers.
    held = [bytes(8), b"", b""]
    live = harness.receiver._table.live
    assert [live[one].shards[1].seen for one in IDS[:3]] == held
    # The next epochs of two handoffs are smaller, so that both have staging.
    harness.deliver(9, open_message(IDS[0], 2, 3))
    harness.deliver(1, open_message(IDS[1], 2, 1))
    assert [len(live[one].shards[1].seen) for one in IDS[:3]] == [6, 2, 0]


def test_a_handoff_that_cannot_fit_or_match_is_refused_with_the_values(harness):
    (reply,) = harness.deliver(1, open_message(IDS[0], 1, 5))
    assert reply.reason == pb.REFUSAL_REASON_TOO_LARGE
    assert str(LAYOUT.handoff_bytes(5)) in reply.detail
    other = KvLayout("m", "r", "bfloat16", 2, 1, 8, 4, 128, "heads,tokens,content", tp_size=2)
    (reply,) = harness.deliver(2, open_message(IDS[1], 1, 1, layout=other))
    assert reply.reason == pb.REFUSAL_REASON_FINGERPRINT
    assert "dtype is 'bfloat16', here 'float32'" in reply.detail
    assert harness.states[IDS[1]] is ReceiveState.FAILED


def test_frames_are_checked_by_the_senders_number_of_shards(harness):
    """The receiver has two shards of one head; this sender has one shard of both."""
    sender, data = LAYOUT.split_into(1), random.Random(3).randbytes(2 * LAYOUT.block_bytes)

    def frame(shard, num_bytes):
        return frames.encode(
            FrameKind.DATA, IDS[0], 1, data[:num_bytes], shard=shard, layer=1, first_block=2,
            num_blocks=1,
        )  # fmt: skip

    assert kinds(harness.deliver(1, open_message(IDS[0], 1, 3, layout=sender))) == OPENED
    assert harness.deliver(1, frame(0, len(data))) == []
    # The first handoff begins where the arena begins.
    start = sender.offset(0, 1, 2, 3)
    assert bytes(harness.memory[start : start + len(data)]) == data
    assert kinds(harness.deliver(1, frame(1, len(data)))) == refused(pb.REFUSAL_REASON_MALFORMED)
    # The next sender has the receiver's layout, so its blocks have half the size.
    assert kinds(harness.deliver(2, open_message(IDS[1], 1, 3))) == OPENED
    stray = frames.encode(FrameKind.DATA, IDS[1], 1, data, shard=0, layer=1, num_blocks=1)
    assert kinds(harness.deliver(2, stray)) == refused(pb.REFUSAL_REASON_MALFORMED)


def draft_frame(layout, num_blocks):
    """Returns a frame with the last block of the draft's only layer."""
    group = layout.groups[-1]
    last = layout.blocks(group, num_blocks)[-1]
    return frames.encode(
        FrameKind.DATA, IDS[0], 1, b"d" * group.block_bytes, shard=1, layer=layout.num_layers,
        first_block=last, num_blocks=1,
    )  # fmt: skip


def test_the_blocks_of_a_senders_draft_are_within_the_staging_of_its_handoff(harness):
    fingerprint = drafted()
    layout = LAYOUT.sent_by(fingerprint)
    assert layout.handoff_bytes(2) == LAYOUT.handoff_bytes(2) + 2 * 2 * 32
    # The arena begins with another handoff.
    harness.deliver(9, open_message(IDS[4], 1, 1))
    begin = harness.receiver.arena_statistics().used_bytes
    opened = harness.deliver(1, open_message(IDS[0], 1, 2, fingerprint=fingerprint))
    assert kinds(opened) == OPENED
    assert harness.deliver(1, draft_frame(layout, 2)) == []
    end = begin + layout.handoff_bytes(2)
    assert bytes(harness.memory[end - 32 : end]) == b"d" * 32
    assert not any(harness.memory[end:])


@pytest.mark.parametrize(
    "changed",
    [
        {"block_size_tokens": 1},
        {"block_size_tokens": 0},
        {"block_size_tokens": 8},
        {"block_bytes": 1},
        {"block_bytes": 3},
        {"num_layers": 0},
        {"table": 1},
        {"kind": pb.KvGroup.KIND_WINDOW, "window_tokens": 4},
        {"kind": pb.KvGroup.KIND_STATE},
    ],
)
def test_a_draft_that_cannot_be_of_a_cache_like_this_is_refused(harness, changed):
    """The receiver has no draft. The blocks would not be where the sender's frames go."""
    fingerprint = drafted(**changed)
    replies = harness.deliver(1, open_message(IDS[0], 1, 1, fingerprint=fingerprint))
    assert kinds(replies) == refused(pb.REFUSAL_REASON_FINGERPRINT)
    assert "must be at least 1 layer of 4 tokens, at least 4 bytes" in replies[0].detail
    harness.assert_empty()


def test_no_frame_is_written_past_the_staging_of_its_handoff(harness):
    """Even if the size of a handoff were computed wrong."""
    harness.deliver(1, open_message(IDS[0], 1, 3))
    extent = harness.receiver._table.live[IDS[0]].extent
    object.__setattr__(extent, "size_bytes", extent.size_bytes - 1)
    assert harness.deliver(1, data_message(IDS[0], 1, 3, 1, 1, 1, 1)) == []
    before = bytes(harness.memory)
    assert any(before)
    (reply,) = harness.deliver(1, data_message(IDS[0], 1, 3, 1, 1, 2, 1))
    assert reply.reason == pb.REFUSAL_REASON_MALFORMED
    assert "end at byte 1536; the handoff has 1535" in reply.detail
    assert bytes(harness.memory) == before
    harness.assert_empty()


@pytest.mark.parametrize("stage", ["queued", "receiving", "committed", "claimed"])
def test_every_state_has_a_timeout(harness, stage):
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
def test_a_drop_at_any_stage_frees_staging_and_refuses_later_opens(harness, stage):
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


def test_a_drop_does_not_free_claimed_staging(harness):
    harness.deliver(1, open_message(IDS[0], 1, 2))
    harness.send_all(1, IDS[0], 1, 2)
    grant, _ = harness.receiver.claim(IDS[0], 0, harness.now)
    harness.receiver.drop(IDS[0], harness.now)
    assert harness.bytes_of(grant) == shard_truth(grant, 0)
    harness.receiver.release(IDS[0], 0, harness.now, all_shards=True)
    harness.assert_empty()


@pytest.mark.parametrize("stage", ["unopened", "receiving", "committed", "claimed"])
@pytest.mark.parametrize("why", [pb.REFUSAL_REASON_CANCELLED, pb.REFUSAL_REASON_EXPIRED])
def test_a_release_without_a_load_fails_the_handoff(harness, stage, why):
    handoff_id, receiver = IDS[0], harness.receiver
    if stage != "unopened":
        harness.deliver(1, open_message(handoff_id, 1, 2))
    if stage in ("committed", "claimed"):
        harness.send_all(1, handoff_id, 1, 2)
    if stage == "claimed":
        harness.seen(receiver.claim(handoff_id, 0, harness.now)[1])
    for not_loaded in (why, pb.REFUSAL_REASON_UNSPECIFIED):
        harness.seen(
            receiver.release(handoff_id, 0, harness.now, all_shards=True, not_loaded=not_loaded)
        )
    (ended,) = receiver.known()
    assert (ended.state, ended.reason) == (ReceiveState.FAILED, why)
    assert receiver.statistics.num_expired == (
        why == pb.REFUSAL_REASON_EXPIRED and stage != "unopened"
    )
    harness.assert_empty()
    assert kinds(harness.deliver(2, open_message(handoff_id, 2, 2))) == refused(why)


def test_a_lost_stream_ends_its_handoff_before_the_commit_only(harness):
    harness.deliver(1, open_message(IDS[0], 1, 1))
    harness.deliver(2, open_message(IDS[1], 1, 1))
    harness.send_all(2, IDS[1], 1, 1)
    for stream in (1, 2):
        harness.seen(harness.receiver.handle_stream_lost(stream, harness.now))
    assert harness.states[IDS[0]] is ReceiveState.FAILED
    assert harness.states[IDS[1]] is ReceiveState.COMMITTED


def test_the_end_of_a_handoff_names_the_stream_of_its_latest_open(harness):
    """The service finds the sender by that stream, to log it."""
    harness.deliver(1, open_message(IDS[0], 1, 1))
    harness.deliver(2, open_message(IDS[0], 2, 1))
    *_, failed = harness.receiver.handle_stream_lost(2, harness.now)
    assert (failed.state, failed.stream) == (ReceiveState.FAILED, 2)
    other = replace(LAYOUT, dtype="float16")
    (frame,) = frames.decode(open_message(IDS[1], 1, 1, layout=other))
    *_, failed = harness.receiver.handle_frame(3, frame, harness.now)
    assert (failed.state, failed.stream) == (ReceiveState.FAILED, 3)


def test_tombstones_are_bounded(harness):
    for number in range(200):
        harness.receiver.drop(number.to_bytes(16, "big"), harness.now)
    assert len(list(harness.receiver.known())) == LIMITS.max_tombstones
