"""Reads of the sender's memory: what waits for their ends, and the thread that makes them."""

import asyncio
import threading

import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferError, TransferRefused
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.service.receive_state import ReceiveState
from baton.kvtransfer.transports.pull import Puller, PullThread
from baton.kvtransfer.transports.transport import EndedPull, Pull
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.receiver_harness import (
    ARENA_BYTES,
    IDS,
    LAYOUT,
    LIMITS,
    OPENED,
    Harness,
    kinds,
    open_message,
    refused,
    shard_truth,
    truth,
)

COMMITTED = [(pb.HandoffReply.KIND_COMMITTED, 0)]


def references(handoff_id, epoch, num_blocks):
    """Returns a reference for each layer of each shard, and the commits of the shards."""
    data, commits, whole = [], [], truth(handoff_id, epoch, num_blocks)
    size = num_blocks * LAYOUT.block_bytes
    for shard in range(LAYOUT.tp_size):
        totals = Totals()
        for layer in range(LAYOUT.num_layers):
            start = LAYOUT.offset(shard, layer, 0, num_blocks)
            value = frames.checksum(whole[start : start + size])
            place = {"shard": shard, "layer": layer, "first_block": 0, "num_blocks": num_blocks}
            data.append(
                frames.encode_reference(handoff_id, epoch, start, blocks_checksum=value, **place)
            )
            digest = frames.position_digest(shard, layer, 0, num_blocks, value)
            totals = totals.plus(size, digest)
        commits.append(
            frames.encode(FrameKind.COMMIT, handoff_id, epoch, totals.encode(), shard=shard)
        )
    return data, commits


class PullHarness(Harness):
    """A receiver whose pulls end when a test says so. The sender's memory begins with the handoff.

    Attributes:
        pulls: Pulls that have not ended.
    """

    def __init__(self):
        super().__init__(transports=("shm", "grpc"))
        self.pulls = []

    def open(self, stream, handoff_id, epoch, num_blocks, **wait):
        offers = [pb.TransportOffer(name="shm")]
        message = open_message(handoff_id, epoch, num_blocks, offers=offers, **wait)
        return kinds(self.deliver(stream, message))

    def seen(self, effects):
        self.pulls += [effect for effect in effects if isinstance(effect, Pull)]
        return super().seen([effect for effect in effects if not isinstance(effect, Pull)])

    def land(self, pull, handoff_id, epoch, num_blocks, *, fails=False):
        """Ends a pull with the bytes of a handoff."""
        if pull in self.pulls:
            self.pulls.remove(pull)
        data = truth(handoff_id, epoch, num_blocks)[pull.source : pull.source + pull.num_bytes]
        self.memory[pull.target : pull.target + pull.num_bytes] = data
        digest = None if fails else frames.checksum(data)
        return kinds(self.seen(self.receiver.handle_pulled(pull.serial, digest, self.now)))

    def used(self):
        self.receiver.check_integrity()
        return self.receiver.arena_statistics().used_bytes


@pytest.fixture
def harness():
    return PullHarness()


@pytest.fixture
def pulling(harness):
    """A handoff of two blocks whose references and commits have arrived; no pull has ended."""
    assert harness.open(1, IDS[0], 1, 2) == OPENED
    data, commits = references(IDS[0], 1, 2)
    for message in data + commits:
        assert harness.deliver(1, message) == []
    assert len(harness.pulls) == len(data)
    return harness


def test_the_commit_waits_until_no_pull_is_outstanding(pulling):
    first, *others = reversed(pulling.pulls)
    for pull in others:
        assert pulling.land(pull, IDS[0], 1, 2) == []
        with pytest.raises(TransferRefused, match="RECEIVING"):
            pulling.receiver.claim(IDS[0], 0, pulling.now)
    assert pulling.land(first, IDS[0], 1, 2) == COMMITTED
    for shard in range(2):
        grant, _ = pulling.receiver.claim(IDS[0], shard, pulling.now)
        assert pulling.bytes_of(grant) == shard_truth(grant, shard)
        pulling.receiver.release(IDS[0], shard, pulling.now)
    pulling.assert_empty()


def test_bytes_that_changed_before_they_were_read_interrupt_the_epoch(pulling):
    altered = pulling.land(pulling.pulls[0], IDS[1], 1, 2)
    assert altered == refused(pb.REFUSAL_REASON_CHECKSUM)
    assert pulling.states[IDS[0]] is ReceiveState.INTERRUPTED


def test_a_read_that_fails_interrupts_the_epoch_so_that_another_transport_is_tried(pulling):
    failed = pulling.land(pulling.pulls[0], IDS[0], 1, 2, fails=True)
    assert failed == refused(pb.REFUSAL_REASON_TRANSPORT)
    # The others end later, and bring nothing.
    for pull in list(pulling.pulls):
        assert pulling.land(pull, IDS[0], 1, 2) == []
    assert pulling.states[IDS[0]] is ReceiveState.INTERRUPTED


def test_reads_that_do_not_end_interrupt_the_epoch(pulling):
    pulling.tick(LIMITS.idle_timeout_s - 0.5)
    pulling.land(pulling.pulls[0], IDS[0], 1, 2)
    assert kinds(pulling.tick(LIMITS.idle_timeout_s - 0.5)) == []
    assert kinds(pulling.tick(0.5)) == refused(pb.REFUSAL_REASON_TRANSPORT)


@pytest.mark.parametrize("end", ["dropped", "aborted", "lost", "released", "expired"])
def test_the_extent_of_an_ended_handoff_is_kept_until_its_reads_have_ended(pulling, end):
    receiver, now = pulling.receiver, pulling.now
    match end:
        case "dropped":
            pulling.seen(receiver.drop(IDS[0], now))
        case "aborted":
            pulling.deliver(1, frames.encode(FrameKind.ABORT, IDS[0], 1))
        case "lost":
            pulling.seen(receiver.handle_stream_lost(1, now))
        case "released":
            pulling.seen(receiver.release(IDS[0], 0, now, all_shards=True))
        case "expired":
            pulling.tick(100.0)
            pulling.tick(100.0)
    assert receiver.num_live == 0
    assert pulling.used() == LAYOUT.handoff_bytes(2)
    # The next handoff gets the other half; the one after it waits for the reads.
    assert pulling.open(2, IDS[1], 1, 2) == OPENED
    assert pulling.open(3, IDS[2], 1, 2) == []
    *others, last = list(pulling.pulls)
    for pull in others:
        assert pulling.land(pull, IDS[0], 1, 2) == []
        # Its end is reported again.
        assert pulling.land(pull, IDS[0], 1, 2) == []
    assert pulling.land(last, IDS[0], 1, 2) == OPENED
    assert pulling.used() == ARENA_BYTES


def test_the_service_ends_when_reads_that_never_end_keep_too_much_staging(pulling):
    pulling.seen(pulling.receiver.drop(IDS[0], pulling.now))
    pulling.tick(LIMITS.idle_timeout_s - 0.5)
    assert pulling.stuck == ""
    assert pulling.receiver.next_deadline() == LIMITS.idle_timeout_s
    pulling.tick(0.5)
    size = LAYOUT.handoff_bytes(2)
    assert pulling.stuck == f"{size} bytes of staging wait for reads that do not end"
    assert pulling.receiver.next_deadline() is None


def test_the_next_epoch_gets_another_extent_before_all_who_wait(pulling):
    assert pulling.open(2, IDS[1], 1, 2) == OPENED
    assert pulling.open(3, IDS[2], 1, 1, wait_ms=9000) == []
    first, *others = list(pulling.pulls)
    pulling.land(first, IDS[0], 1, 2, fails=True)
    # There is no room for another extent. The sender does not wait, but its room was promised.
    assert pulling.open(1, IDS[0], 2, 2, wait_ms=0) == []
    assert pulling.tick(LIMITS.retry_timeout_s / 2) == []
    for pull in others[:-1]:
        assert pulling.land(pull, IDS[0], 1, 2) == []
    assert pulling.land(others[-1], IDS[0], 1, 2) == OPENED
    assert pulling.opened[IDS[0]] == 2
    assert pulling.states[IDS[2]] is ReceiveState.QUEUED


def test_reads_of_an_older_epoch_write_into_no_later_one(harness):
    assert harness.open(1, IDS[0], 1, 2) == OPENED
    for message in references(IDS[0], 1, 2)[0]:
        harness.deliver(1, message)
    old = list(harness.pulls)
    # The sender has opened the handoff again without a refusal.
    assert harness.open(1, IDS[0], 2, 2) == OPENED
    data, commits = references(IDS[0], 2, 2)
    for message in data + commits:
        harness.deliver(1, message)
    new = [pull for pull in harness.pulls if pull not in old]
    for pull in new[:-1]:
        harness.land(pull, IDS[0], 2, 2)
    for pull in old[:-1]:
        assert harness.land(pull, IDS[0], 1, 2) == []
    assert harness.land(new[-1], IDS[0], 2, 2) == COMMITTED
    assert harness.land(old[-1], IDS[0], 1, 2) == []
    grant, _ = harness.receiver.claim(IDS[0], 0, harness.now)
    assert harness.bytes_of(grant) == shard_truth(grant, 0, epoch=2)


@pytest.mark.parametrize("fault", ["commit again", "data after the commit", "the same blocks"])
def test_frames_are_checked_while_reads_are_outstanding(pulling, fault):
    data, commits = references(IDS[0], 1, 2)
    if fault == "the same blocks":
        pulling.open(2, IDS[1], 1, 1)
        (first, *_), _ = references(IDS[1], 1, 1)
        assert pulling.deliver(2, first) == []
        replies = pulling.deliver(2, first)
    else:
        replies = pulling.deliver(1, commits[1] if fault == "commit again" else data[0])
    assert kinds(replies) == refused(pb.REFUSAL_REASON_MALFORMED)


def test_references_stay_inside_the_senders_memory(harness):
    def reply_to(offset, payload=None):
        one = PullHarness()
        one.open(1, IDS[0], 1, 2)
        place = {"shard": 0, "layer": 0, "first_block": 0, "num_blocks": 2}
        message = frames.encode_reference(IDS[0], 1, offset, blocks_checksum=7, **place)
        if payload is not None:
            message = frames.encode(FrameKind.REFERENCE, IDS[0], 1, payload, num_blocks=2)
        replies = one.deliver(1, message)
        assert one.pulls == [] or not replies
        return [reply.detail for reply in replies]

    size, limit = 2 * LAYOUT.block_bytes, 2**20
    assert reply_to(limit - size) == []
    for offset in (limit - size + 1, 2**63, 2**64 - 1):
        (detail,) = reply_to(offset)
        assert detail.endswith(f"the sender's segment has {limit}")
    assert reply_to(0, b"1234567") == ["reference of 7 bytes; must be 8"]
    harness.deliver(2, open_message(IDS[1], 1, 2))
    (reply,) = harness.deliver(2, references(IDS[1], 1, 2)[0][0])
    assert reply.detail == "a reference by grpc, which carries the bytes themselves"


class HandPuller(Puller):
    """Ends the reads of a list when a test says so."""

    poll_s = 0.001

    def __init__(self, problem=None):
        self.problem, self.started, self.may_end = problem, [], threading.Event()
        self.closed = False

    def open(self):
        if self.problem:
            raise self.problem

    def start(self, source, pull):
        self.started.append((source, pull.serial))

    def ended(self):
        if not self.may_end.is_set():
            return []
        ended, self.started = self.started, []
        return [EndedPull(serial, source) for source, serial in ended]

    def close(self):
        self.closed = True


class Ends:
    """Takes the ends of pulls, and lets tests wait for them."""

    def __init__(self):
        self.pulls, self.changed = [], asyncio.Event()

    def __call__(self, pulls):
        self.pulls += pulls
        self.changed.set()

    async def until(self, number):
        async with asyncio.timeout(120):
            while len(self.pulls) < number:
                self.changed.clear()
                await self.changed.wait()
        return self.pulls


async def test_each_posted_read_is_reported_once_when_it_has_ended():
    puller, ends = HandPuller(), Ends()
    thread = PullThread("test", puller, ends)
    for serial in range(5):
        thread.post(serial * 10, Pull(serial, 1, 0, 0, 4))
    assert ends.pulls == []
    puller.may_end.set()
    assert await ends.until(5) == [EndedPull(serial, serial * 10) for serial in range(5)]
    assert thread.problem is None
    thread.post(50, Pull(5, 1, 0, 0, 4))
    assert (await ends.until(6))[-1] == EndedPull(5, 50)
    await thread.close()
    assert puller.closed


async def test_a_thread_closes_although_reads_never_end():
    puller, ends = HandPuller(), Ends()
    thread = PullThread("test", puller, ends)
    thread.post(0, Pull(1, 1, 0, 0, 4))
    await thread.close()
    assert (puller.closed, ends.pulls, thread.problem) == (True, [], "is closed")


@pytest.mark.parametrize(
    ("error", "problem"),
    [(TransferError("no such device"), "no such device"), (ValueError("x"), "internal error")],
)
async def test_a_thread_that_cannot_read_says_why(error, problem):
    thread = PullThread("test", HandPuller(error), Ends())
    await thread.close()
    assert thread.problem == problem
