"""The receiving state machine: which bytes may enter staging, and which may be loaded from it.

Pure and synchronous: time is a parameter, and effects are returned. The network writes only into
the extent that belongs to one (handoff, epoch). A handoff can be claimed only after every block of
every shard has arrived exactly once and was verified.

A reference becomes a pull: this service itself reads the bytes into the extent. A commit counts
when all pulls before it have ended, and an extent is given to another handoff only when no pull may
write to it any more (pulls.py).

When the transport of an epoch fails or alters bytes, the epoch is interrupted: the handoff keeps
its staging for some time, and its sender may send everything again as the next epoch, on another
transport.

receive_open.py handles opens, receive_checks.py checks frames, and receive_table.py knows which
handoffs have staging and how each one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from baton.kvtransfer.arena import Arena, ArenaStatistics
from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.frames import Frame, FrameKind, copy, position_digest
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.pulls import OutstandingPull
from baton.kvtransfer.service.receive_checks import data_problem, missing, promised_totals
from baton.kvtransfer.service.receive_open import OpenHandler
from baton.kvtransfer.service.receive_state import (
    SENDER_AT_WORK,
    Changed,
    Effect,
    Grant,
    Handoff,
    ReceivedFrame,
    ReceiverLimits,
    ReceiverStatistics,
    ReceiveState,
)
from baton.kvtransfer.service.receive_table import ReceiveTable
from baton.kvtransfer.transports.negotiation import Choice
from baton.kvtransfer.transports.transport import Pull
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState


class Receiver:
    """The handoffs from other workers to this one.

    The caller numbers incoming streams and never reuses a number. A stream carries one handoff.

    Args:
        arena: Arena of the receiving half of the segment; this object is its only user.
        memory: The whole segment, indexed by the arena's offsets.
        limits: How long each state may last, and how much is remembered.
        choose: Takes one of an open's offers for a stream; raises MalformedFrame when the service
            can use none of them.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        limits: ReceiverLimits,
        choose: Callable[[int, pb.HandoffOpen], Choice],
    ) -> None:
        self._table = ReceiveTable(arena, limits)
        self._opens = OpenHandler(self._table, choose)
        self._memory, self._limits = memory, limits
        self._layout: KvLayout | None = None

    def configure(self, layout: KvLayout) -> None:
        """Sets the layout of the KV cache; called once, before anything else."""
        self._layout = layout

    def handle_frame(self, stream: int, frame: Frame, now: float) -> list[Effect]:
        """Applies one frame that a stream carried."""
        if frame.kind is FrameKind.OPEN:
            self._opens.handle(stream, frame, self._known_layout(), now)
        elif (handoff := self._addressed(stream, frame)) is not None:
            self._take(handoff, frame, now)
        return self._table.take_effects()

    def handle_pulled(self, serial: int, digest: int | None, now: float) -> list[Effect]:
        """Applies the end of a pull: nothing can write to its target any more.

        Args:
            serial: Number of the pull. Only the first report of its end counts.
            digest: XXH3-64 of the bytes that landed; None when the read failed.
            now: Current time.monotonic(), in seconds.
        """
        ended = self._table.end_pull(serial, now)
        # The bytes of an interrupted epoch are not used.
        if ended is not None and ended[0].state is _S.RECEIVING:
            self._pulled(*ended, digest, now)
        return self._table.take_effects()

    def handle_malformed(self, stream: int, error: MalformedFrame, now: float) -> list[Effect]:
        """Fails the handoff of a stream that carried bytes that are not a frame.

        A wrong header checksum means an altered frame, so it only interrupts the epoch.
        """
        handoff = self._table.of_stream(stream)
        altered = error.reason == pb.REFUSAL_REASON_CHECKSUM
        if handoff is not None and altered and handoff.state is _S.RECEIVING:
            self._table.interrupt(handoff, error.reason, str(error), now)
        elif handoff is not None and handoff.state in SENDER_AT_WORK:
            self._table.fail(handoff, error.reason, str(error), now)
        else:
            self._table.refuse(stream, b"", 0, error.reason, str(error))
        return self._table.take_effects()

    def handle_stream_lost(self, stream: int, now: float) -> list[Effect]:
        """Fails the handoff of a stream that has ended before the commit."""
        handoff = self._table.remove_stream(stream)
        if handoff is not None and handoff.state in SENDER_AT_WORK:
            detail = "the sender's stream ended before the commit"
            incomplete = (pb.REFUSAL_REASON_INCOMPLETE, detail)
            self._table.fail(handoff, *(handoff.problem or incomplete), now)
        return self._table.take_effects()

    def serves(self, stream: int) -> bool:
        """Returns whether a stream carries a handoff that still needs its frames."""
        handoff = self._table.of_stream(stream)
        return handoff is not None and handoff.state in SENDER_AT_WORK

    def claim(self, handoff_id: bytes, shard: int, now: float) -> tuple[Grant, list[Effect]]:
        """Lets a rank read one of the sender's shards of a committed handoff until its release.

        Raises:
            TransferRefused: The handoff is not committed (any more), or this shard does not exist
                or was released.
        """
        handoff = self._table.live.get(handoff_id)
        if handoff is None or handoff.extent is None:
            raise TransferRefused(
                f"handoff {handoff_id.hex()} is {self._table.state_text(handoff_id)}"
            )
        if handoff.state not in (_S.COMMITTED, _S.CLAIMED):
            raise TransferRefused(f"handoff {handoff_id.hex()} is {handoff.state.name}")
        if not 0 <= shard < len(handoff.shards) or handoff.shards[shard].released:
            raise TransferRefused(f"handoff {handoff_id.hex()} has nothing for shard {shard}")
        progress = handoff.shards[shard]
        if not progress.claimed:
            progress.claimed, progress.in_order = True, _in_order(progress.frames)
            handoff.deadline = now + self._limits.claim_timeout_s
        if handoff.state is _S.COMMITTED:
            self._table.advance(handoff, _S.CLAIMED)
        return self._grant(handoff, shard, progress.in_order), self._table.take_effects()

    def release(
        self,
        handoff_id: bytes,
        shard: int,
        now: float,
        *,
        all_shards: bool = False,
        not_loaded: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
    ) -> list[Effect]:
        """Releases one shard, or all: they are loaded, or not needed. Idempotent.

        Args:
            handoff_id: 16 bytes.
            shard: Index of the shard; not used with all_shards.
            now: Current time.monotonic(), in seconds.
            all_shards: Whether to release all shards.
            not_loaded: Why the handoff was not loaded although it should have been; fails it.
        """
        handoff = self._table.live.get(handoff_id)
        if not_loaded:
            expired = not_loaded == pb.REFUSAL_REASON_EXPIRED
            self._table.statistics.num_expired += expired and handoff is not None
            self._table.fail_by_id(
                handoff_id, not_loaded, _not_loaded_detail(not_loaded, handoff), now
            )
            return self._table.take_effects()
        if handoff is None:
            if all_shards and self._table.end_reason(handoff_id) is None:
                self._table.remember_ended(
                    Changed(handoff_id, 0, _S.RELEASED, detail="released before its open")
                )
            return self._table.take_effects()
        if 0 <= shard < len(handoff.shards):
            handoff.shards[shard].released = True
        if all_shards or all(each.released for each in handoff.shards):
            self._table.end(handoff, _S.RELEASED, pb.REFUSAL_REASON_CANCELLED, "released", now)
        return self._table.take_effects()

    def drop(self, handoff_id: bytes, now: float) -> list[Effect]:
        """Fails a handoff that is no longer needed; an open that comes later is refused.

        A claimed handoff stays until its release or its deadline, because a rank is reading it.
        """
        handoff = self._table.live.get(handoff_id)
        if handoff is None or handoff.state is not _S.CLAIMED:
            detail = "dropped by the receiving worker"
            self._table.fail_by_id(handoff_id, pb.REFUSAL_REASON_CANCELLED, detail, now)
        return self._table.take_effects()

    def expire(self, now: float) -> list[Effect]:
        """Ends every handoff whose state has lasted too long."""
        self._table.expire(now)
        return self._table.take_effects()

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which `expire` may have something to do."""
        return self._table.next_deadline()

    def known(self) -> Iterator[Changed]:
        """Yields the state of every handoff that is live or remembered."""
        return self._table.known()

    def begin_erasing(self) -> None:
        """Begins to overwrite the bytes of earlier handoffs in this half of staging."""
        self._table.eraser.begin()

    def erase(self) -> None:
        """Overwrites some of these bytes."""
        self._table.eraser.step(self._memory)

    @property
    def must_erase(self) -> bool:
        """Whether `erase` has something to do."""
        return self._table.eraser.has_work

    def arena_statistics(self) -> ArenaStatistics:
        """Returns the usage of the receiving half of staging."""
        return self._table.arena_statistics()

    @property
    def statistics(self) -> ReceiverStatistics:
        """Counts since the service started."""
        return self._table.statistics

    @property
    def num_live(self) -> int:
        """Number of handoffs that are not over."""
        return self._table.num_live

    @property
    def num_waiting(self) -> int:
        """Number of handoffs that wait for staging."""
        return self._table.num_waiting

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the live handoffs hold staging and streams."""
        self._table.check_integrity()

    def _grant(self, handoff: Handoff, shard: int, frames: Sequence[ReceivedFrame]) -> Grant:
        assert handoff.extent is not None
        begin = shard * handoff.layout.shard_bytes(handoff.num_blocks)
        return Grant(
            handoff.handoff_id,
            handoff.extent.offset + begin,
            handoff.num_blocks,
            handoff.num_tokens,
            tuple(frames),
        )

    def _take(self, handoff: Handoff, frame: Frame, now: float) -> None:
        """Applies a frame of a handoff's current epoch."""
        if frame.kind is FrameKind.ABORT:
            if handoff.state is not _S.CLAIMED:
                given_up = (pb.REFUSAL_REASON_CANCELLED, "the sender gave it up")
                self._table.fail(handoff, *(handoff.problem or given_up), now)
        elif handoff.state is _S.INTERRUPTED:
            # The frame was on its way when the sender was told of the interruption.
            self._table.statistics.refusals[pb.REFUSAL_REASON_OLD_EPOCH] += 1
        elif frame.kind in (FrameKind.DATA, FrameKind.REFERENCE):
            self._data(handoff, frame, now)
        elif frame.kind is FrameKind.COMMIT:
            self._commit(handoff, frame, now)
        else:
            raise AssertionError(f"{frame.kind.name} is taken before it comes here")

    def _addressed(self, stream: int, frame: Frame) -> Handoff | None:
        """Returns the live handoff that a frame may change; otherwise refuses the frame.

        A frame of another stream's handoff, or of an older epoch, must not change that handoff.
        """
        handoff_id, epoch = frame.handoff_id, frame.epoch
        live = self._table.live.get(handoff_id)
        if live is None:
            if (why := self._table.end_reason(handoff_id)) is not None:
                self._table.refuse(stream, handoff_id, epoch, *why)
            else:
                detail = "this handoff was never opened here"
                self._table.refuse(
                    stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail
                )
        elif epoch < live.epoch:
            detail = f"epoch is {epoch}; epoch {live.epoch} is open"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail)
        elif live.stream != stream or epoch != live.epoch:
            detail = f"epoch {epoch} of this handoff was not opened on this stream"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail)
        else:
            return live
        return None

    def _data(self, handoff: Handoff, frame: Frame, now: float) -> None:
        layout = handoff.layout
        if handoff.state in (_S.COMMITTED, _S.CLAIMED):
            detail = "a data frame after the commit"
            self._table.refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        if (problem := data_problem(handoff, frame, layout)) is not None:
            self._table.fail(handoff, pb.REFUSAL_REASON_MALFORMED, problem, now)
            return
        assert handoff.extent is not None
        progress = handoff.shards[frame.shard]
        offset = layout.offset(frame.shard, frame.layer, frame.first_block, handoff.num_blocks)
        num_bytes = frame.num_blocks * layout.group_of(frame.layer).block_bytes
        if offset + num_bytes > handoff.extent.size_bytes:
            # Bytes behind the extent belong to other handoffs, or to nothing that is mapped.
            detail = (
                f"layer {frame.layer}, blocks {frame.first_block} to "
                f"{frame.first_block + frame.num_blocks}: end at byte {offset + num_bytes}; the "
                f"handoff has {handoff.extent.size_bytes}"
            )
            self._table.fail(handoff, pb.REFUSAL_REASON_MALFORMED, detail, now)
            return
        start = handoff.extent.offset + offset
        first = layout.index(frame.layer, frame.first_block, handoff.num_blocks)
        progress.seen[first : first + frame.num_blocks] = b"\x01" * frame.num_blocks
        handoff.deadline = now + self._limits.idle_timeout_s
        received = ReceivedFrame(frame.layer, frame.first_block, frame.num_blocks, frame.checksum)
        if frame.kind is FrameKind.REFERENCE:
            assert handoff.stream is not None
            serial = self._table.pulls.begin(
                OutstandingPull(
                    handoff.handoff_id, frame.shard, received, num_bytes, handoff.extent
                )
            )
            progress.num_pulls += 1
            self._table.add_effect(Pull(serial, handoff.stream, frame.source(), start, num_bytes))
            return
        digest = copy(self._memory[start : start + num_bytes], frame.payload)
        self._arrived(handoff, frame.shard, received, num_bytes, digest, now)

    def _pulled(
        self, handoff: Handoff, pull: OutstandingPull, digest: int | None, now: float
    ) -> None:
        handoff.deadline = now + self._limits.idle_timeout_s
        if digest is None:
            detail = (
                f"layer {pull.frame.layer}, block {pull.frame.first_block}: the sender's memory "
                "could not be read"
            )
            self._table.interrupt(handoff, pb.REFUSAL_REASON_TRANSPORT, detail, now)
            return
        if self._arrived(handoff, pull.shard, pull.frame, pull.num_bytes, digest, now):
            self._complete(handoff, pull.shard, now)

    def _arrived(
        self,
        handoff: Handoff,
        shard: int,
        frame: ReceivedFrame,
        num_bytes: int,
        digest: int,
        now: float,
    ) -> bool:
        """Adds blocks whose bytes are in staging; returns False when the bytes are wrong.

        Args:
            handoff: The handoff; the bytes belong to its current epoch.
            shard: Shard of the blocks.
            frame: Place of the blocks, and the checksum that their sender computed.
            num_bytes: Their size.
            digest: Checksum of the bytes in staging.
            now: Current time.monotonic(), in seconds.
        """
        if digest != frame.checksum:
            detail = f"layer {frame.layer}, block {frame.first_block}: the bytes were altered"
            self._table.interrupt(handoff, pb.REFUSAL_REASON_CHECKSUM, detail, now)
            return False
        progress = handoff.shards[shard]
        progress.num_seen += frame.num_blocks
        progress.frames.append(frame)
        place = position_digest(
            shard, frame.layer, frame.first_block, frame.num_blocks, frame.checksum
        )
        progress.totals = progress.totals.plus(num_bytes, place)
        self._table.statistics.num_bytes[handoff.choice.transport] += num_bytes
        self._table.statistics.num_frames[handoff.choice.transport] += 1
        return True

    def _commit(self, handoff: Handoff, frame: Frame, now: float) -> None:
        layout = handoff.layout
        if handoff.state in (_S.COMMITTED, _S.CLAIMED):
            detail = "a second commit"
            self._table.refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        try:
            totals = promised_totals(handoff, frame, layout)
        except MalformedFrame as error:
            if error.reason == pb.REFUSAL_REASON_MALFORMED:
                self._table.fail(handoff, error.reason, str(error), now)
            else:
                self._table.interrupt(handoff, error.reason, str(error), now)
            return
        handoff.shards[frame.shard].promised = totals
        handoff.deadline = now + self._limits.idle_timeout_s
        self._complete(handoff, frame.shard, now)

    def _complete(self, handoff: Handoff, shard: int, now: float) -> None:
        """Commits a shard if its commit has come and none of its pulls is outstanding."""
        progress = handoff.shards[shard]
        if progress.promised is None or progress.num_pulls:
            return
        expected = handoff.layout.shard_blocks(handoff.num_blocks)
        if (problem := missing(progress, shard, expected)) is not None:
            self._table.interrupt(handoff, pb.REFUSAL_REASON_INCOMPLETE, problem, now)
            return
        progress.committed = True
        if all(each.committed for each in handoff.shards):
            handoff.deadline = now + self._limits.commit_ttl_s
            self._table.statistics.num_committed += 1
            self._table.advance(handoff, _S.COMMITTED)
            self._table.reply(handoff, pb.HandoffReply.KIND_COMMITTED)

    def _known_layout(self) -> KvLayout:
        if self._layout is None:
            raise TransferRefused("the transfer service is not configured yet")
        return self._layout


def _in_order(frames: Sequence[ReceivedFrame]) -> list[ReceivedFrame]:
    return sorted(frames, key=lambda frame: (frame.layer, frame.first_block))


def _not_loaded_detail(reason: pb.RefusalReason.ValueType, handoff: Handoff | None) -> str:
    if reason == pb.REFUSAL_REASON_CANCELLED:
        return "its request ended before it was loaded"
    if reason == pb.REFUSAL_REASON_EXPIRED:
        is_there = handoff is not None and handoff.state in (_S.COMMITTED, _S.CLAIMED)
        return "not loaded in time" if is_there else "not committed in time"
    if reason == pb.REFUSAL_REASON_CHECKSUM:
        return "its bytes were altered in staging"
    return "it holds something else than its request expects"
