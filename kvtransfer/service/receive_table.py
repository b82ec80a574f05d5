"""The handoffs on their way to one worker: their staging, their streams, and how they end.

receiver.py decides what to do with each call; this table carries it out. Pure and synchronous.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from baton.kvtransfer.arena import Arena, ArenaStatistics
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.service.pulls import OutstandingPull, OutstandingPulls
from baton.kvtransfer.service.receive_state import (
    SENDER_AT_WORK,
    TRANSITIONS,
    Changed,
    Effect,
    Handoff,
    ReceiverLimits,
    ReceiverStatistics,
    ReceiveState,
    Reply,
    Stuck,
    changed,
)
from baton.kvtransfer.service.staging_eraser import StagingEraser
from baton.kvtransfer.service.staging_queue import StagingQueue
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState
# Largest share of staging that may be reserved for reads that have not ended for idle_timeout_s.
# Above it the service ends itself (Stuck): nothing in the process can end such a read, and a new
# process has new staging.
MAX_STUCK_SHARE = 0.25


class ReceiveTable:
    """The handoffs that are live, and a bounded number of those that are over.

    Every change is also an effect; the caller takes the effects with `take_effects`.

    Args:
        arena: Arena of the receiving half of the segment; this object is its only user.
        limits: How long each state may last, and how much is remembered.

    Attributes:
        live: Handoffs that are not over, by ID; only this class changes the dictionary.
        streams: Handoff ID that each stream carries.
        pulls: Pulls that have not ended.
        statistics: Counts since the service started.
    """

    def __init__(self, arena: Arena, limits: ReceiverLimits) -> None:
        self._limits = limits
        self.live: dict[bytes, Handoff] = {}
        self.streams: dict[int, bytes] = {}
        self._queue = StagingQueue(arena)
        self.pulls = OutstandingPulls(self._queue.free)
        # The last state of handoffs that are over, oldest first.
        self._ended: OrderedDict[bytes, Changed] = OrderedDict()
        self._effects: list[Effect] = []
        self._expired_at = 0.0
        self.statistics = ReceiverStatistics()

    def of_stream(self, stream: int) -> Handoff | None:
        """Returns the live handoff that a stream carries."""
        return self.live.get(self.streams.get(stream, b""))

    def end_reason(self, handoff_id: bytes) -> tuple[pb.RefusalReason.ValueType, str] | None:
        """Returns why a handoff takes no more frames; None unless it is over and remembered."""
        ended = self._ended.get(handoff_id)
        if ended is None:
            return None
        if ended.state is _S.RELEASED:
            return pb.REFUSAL_REASON_UNKNOWN_HANDOFF, "it was loaded or released already"
        return ended.reason, f"it has failed already: {ended.detail}"

    def take_effects(self) -> list[Effect]:
        """Returns the effects since they were taken last."""
        effects, self._effects = self._effects, []
        return effects

    def expire(self, now: float) -> None:
        """Ends every handoff whose state has lasted too long."""
        self._expired_at = now
        if self._stuck_bytes(now) > self._queue.statistics().total_bytes * MAX_STUCK_SHARE:
            detail = f"{self._stuck_bytes(now)} bytes of staging wait for reads that do not end"
            self._effects.append(Stuck(detail))
        for handoff in [each for each in self.live.values() if each.deadline <= now]:
            if handoff.state is _S.QUEUED and handoff.handoff_id in self._queue:
                detail = "no room in the receiver's staging in time"
                self.fail(handoff, pb.REFUSAL_REASON_NO_ROOM, detail, now)
            elif handoff.problem is not None and handoff.deadline <= now:
                self.fail(handoff, *handoff.problem, now)
            elif handoff.deadline <= now and self._is_pulled(handoff):
                self.statistics.num_expired += 1
                detail = "reads of the sender's memory have not ended in time"
                self.interrupt(handoff, pb.REFUSAL_REASON_TRANSPORT, detail, now)
            elif handoff.deadline <= now:
                self.statistics.num_expired += 1
                detail = f"{handoff.state.name} for too long"
                self.fail(handoff, pb.REFUSAL_REASON_EXPIRED, detail, now)

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which `expire` may have something to do."""
        deadlines = [handoff.deadline for handoff in self.live.values()]
        stuck_at = [
            since + self._limits.idle_timeout_s for _, since in self.pulls.quarantined_since()
        ]
        deadlines += [each for each in stuck_at if each > self._expired_at]
        return min(deadlines, default=None)

    def known(self) -> Iterator[Changed]:
        """Yields the state of every handoff that is live or remembered."""
        yield from self._ended.values()
        for handoff in self.live.values():
            yield changed(handoff)

    @property
    def eraser(self) -> StagingEraser:
        """Overwrites the bytes of earlier handoffs."""
        return self._queue.eraser

    def arena_statistics(self) -> ArenaStatistics:
        """Returns the usage of the receiving half of staging."""
        return self._queue.statistics()

    @property
    def num_live(self) -> int:
        """Number of handoffs that are not over."""
        return len(self.live)

    @property
    def num_waiting(self) -> int:
        """Number of handoffs that wait for staging."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each extent is a live handoff's, or in quarantine."""
        holding = [handoff for handoff in self.live.values() if handoff.extent is not None]
        self._queue.check_integrity(len(holding) + self.pulls.num_quarantined)
        self.pulls.check_integrity([each.extent for each in holding if each.extent is not None])
        for handoff in holding:
            own = [pull for pull in self.pulls if pull.extent is handoff.extent]
            assert all(pull.handoff_id == handoff.handoff_id for pull in own), handoff
            assert len(own) == sum(shard.num_pulls for shard in handoff.shards), handoff
            is_complete = handoff.state in (_S.COMMITTED, _S.CLAIMED)
            assert not (own and is_complete), handoff
        for handoff in self.live.values():
            assert (handoff.state is _S.QUEUED) == (handoff.extent is None), handoff
            assert (handoff.state is _S.QUEUED) == (handoff.handoff_id in self._queue), handoff
            assert handoff.handoff_id not in self._ended, handoff
            if handoff.stream is not None:
                assert self.streams[handoff.stream] == handoff.handoff_id, handoff
        assert len(self._queue) + len(holding) == len(self.live)
        for stream, handoff_id in self.streams.items():
            assert self.live[handoff_id].stream == stream, (stream, handoff_id)
        assert len(self._ended) <= self._limits.max_tombstones

    def no_room_reason(
        self, num_bytes: int, live: Handoff | None
    ) -> tuple[pb.RefusalReason.ValueType, str] | None:
        """Returns why a handoff cannot wait for staging; None when it can, or needs no wait."""
        if not self._queue.fits_ever(num_bytes):
            total = self._queue.statistics().total_bytes
            detail = f"handoff of {num_bytes} bytes; the receiver's staging has {total}"
            return pb.REFUSAL_REASON_TOO_LARGE, detail
        if live is None and len(self._queue) >= self._limits.max_queued:
            detail = f"{len(self._queue)} handoffs wait for room already"
            return pb.REFUSAL_REASON_NO_ROOM, detail
        return None

    def add(self, handoff: Handoff) -> None:
        """Adds a new handoff, which has no staging and no stream yet."""
        self.live[handoff.handoff_id] = handoff

    def assign_stream(self, handoff: Handoff, stream: int) -> None:
        """Assigns a stream to a handoff; frames of it on another stream are refused from now on."""
        if handoff.stream is not None:
            del self.streams[handoff.stream]
        handoff.stream = handoff.last_stream = stream
        self.streams[stream] = handoff.handoff_id

    def remove_stream(self, stream: int) -> Handoff | None:
        """Removes a stream that has ended; returns the live handoff that it carried."""
        handoff = self.live.get(self.streams.pop(stream, b""))
        if handoff is not None:
            handoff.stream = None
        return handoff

    def reserve(self, handoff: Handoff, num_bytes: int, wait_s: float, now: float) -> None:
        """Reserves staging for an epoch of a handoff, or adds the handoff to the queue.

        The extent of the epoch before is used again, unless its size is wrong or pulls may still
        write to it. The handoff is then the first to get room.
        """
        wait_s, had_room = min(wait_s, self._limits.max_wait_s), handoff.extent is not None
        if handoff.extent is not None:
            if handoff.num_bytes == num_bytes and not self.pulls.writes_to(handoff.extent):
                self._receive(handoff, now)
                return
            self._give_up_extent(handoff, now)
            wait_s = max(wait_s, self._limits.retry_timeout_s)
        handoff.num_bytes = num_bytes
        handoff.deadline = now + wait_s
        self._queue.add(handoff.handoff_id, num_bytes, first=had_room)
        self._admit(now)
        if handoff.extent is None:
            self.advance(handoff, _S.QUEUED)

    def add_effect(self, effect: Effect) -> None:
        """Adds an effect."""
        self._effects.append(effect)

    def end_pull(self, serial: int, now: float) -> tuple[Handoff, OutstandingPull] | None:
        """Removes a pull that has ended; returns it with its handoff if that still owns its extent.

        Args:
            serial: Number of the pull; ignored if the pull's end was reported already.
            now: Current time.monotonic(), in seconds.
        """
        pull = self.pulls.end(serial)
        if pull is None:
            return None
        # The pull may have been the last one of an extent in quarantine.
        self._admit(now)
        handoff = self.live.get(pull.handoff_id)
        if handoff is None or handoff.extent is not pull.extent:
            return None
        handoff.shards[pull.shard].num_pulls -= 1
        return handoff, pull

    def _stuck_bytes(self, now: float) -> int:
        """Returns the size of the extents whose pulls have not ended for idle_timeout_s."""
        longest = self._limits.idle_timeout_s
        return sum(
            extent.size_bytes
            for extent, since in self.pulls.quarantined_since()
            if since + longest <= now
        )

    def _is_pulled(self, handoff: Handoff) -> bool:
        return (
            handoff.state is _S.RECEIVING
            and handoff.extent is not None
            and self.pulls.writes_to(handoff.extent)
        )

    def _give_up_extent(self, handoff: Handoff, now: float) -> None:
        if handoff.extent is not None:
            self.pulls.give_up(handoff.extent, now)
            handoff.extent = None

    def _admit(self, now: float) -> None:
        for handoff_id, extent in self._queue.admit():
            handoff = self.live[handoff_id]
            handoff.extent = extent
            self._receive(handoff, now)

    def _receive(self, handoff: Handoff, now: float) -> None:
        handoff.deadline = now + self._limits.idle_timeout_s
        for shard in handoff.shards:
            shard.seen = bytearray(handoff.layout.shard_blocks(handoff.num_blocks))
        self.advance(handoff, _S.RECEIVING)
        self.reply(handoff, pb.HandoffReply.KIND_OPENED)

    def interrupt(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Ends the epoch of a handoff; the sender may open the next epoch in the same staging."""
        self.refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        handoff.problem = reason, detail
        handoff.deadline = now + self._limits.retry_timeout_s
        self.advance(handoff, _S.INTERRUPTED)

    def fail(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Ends a handoff that failed."""
        self.statistics.num_failed += 1
        self.end(handoff, _S.FAILED, reason, detail, now)

    def fail_by_id(
        self, handoff_id: bytes, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Fails a handoff, also before its open; a handoff that is over stays as it is."""
        if (handoff := self.live.get(handoff_id)) is not None:
            self.fail(handoff, reason, detail, now)
        elif handoff_id not in self._ended:
            self.remember_ended(Changed(handoff_id, 0, _S.FAILED, reason=reason, detail=detail))

    def end(
        self,
        handoff: Handoff,
        state: ReceiveState,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
    ) -> None:
        """Ends a handoff, the only way it ends; frees its staging and admits the next handoff."""
        if handoff.state in SENDER_AT_WORK and handoff.stream is not None:
            self.refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        if handoff.stream is not None:
            del self.streams[handoff.stream]
        self.advance(handoff, state, quiet=True)
        self._give_up_extent(handoff, now)
        self._queue.remove(handoff.handoff_id)
        del self.live[handoff.handoff_id]
        if state is _S.RELEASED:
            reason, detail = pb.REFUSAL_REASON_UNSPECIFIED, ""
        self.remember_ended(changed(handoff, reason, detail))
        self._admit(now)

    def reject(
        self,
        stream: int,
        frame: Frame,
        live: Handoff | None,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
    ) -> None:
        """Refuses an open and fails its handoff, also if an older epoch of it was live."""
        self.refuse(stream, frame.handoff_id, frame.epoch, reason, detail)
        if live is not None:
            if live.stream == stream:
                del self.streams[stream]
                live.stream = None
            self.fail(live, reason, detail, now)
        else:
            self.statistics.num_failed += 1
            self.remember_ended(
                Changed(
                    frame.handoff_id,
                    frame.epoch,
                    _S.FAILED,
                    reason=reason,
                    detail=detail,
                    stream=stream,
                )
            )

    def remember_ended(self, ended: Changed) -> None:
        """Keeps the last state of a handoff, so that late frames are refused with the reason."""
        self._ended[ended.handoff_id] = ended
        if len(self._ended) > self._limits.max_tombstones:
            self._ended.popitem(last=False)
        self._effects.append(ended)

    def advance(self, handoff: Handoff, state: ReceiveState, *, quiet: bool = False) -> None:
        """Moves a handoff to a state; `quiet` leaves the effect to the caller."""
        if state not in TRANSITIONS[handoff.state]:
            raise AssertionError(f"{handoff.state.name} to {state.name} is not in the table")
        handoff.state = state
        if not quiet:
            self._effects.append(changed(handoff))

    def reply(self, handoff: Handoff, kind: pb.HandoffReply.Kind.ValueType) -> None:
        """Replies on the stream of a handoff."""
        if handoff.stream is not None:
            reply = Reply(handoff.stream, kind, handoff.handoff_id, handoff.epoch)
            if kind == pb.HandoffReply.KIND_OPENED:
                chosen = handoff.choice
                reply = replace(reply, transport=chosen.transport, transport_reason=chosen.reason)
            self._effects.append(reply)

    def refuse(
        self,
        stream: int | None,
        handoff_id: bytes,
        epoch: int,
        reason: pb.RefusalReason.ValueType,
        detail: str,
    ) -> None:
        """Counts a refusal, and replies with it when there is a stream."""
        self.statistics.refusals[reason] += 1
        if stream is not None:
            kind = pb.HandoffReply.KIND_REFUSED
            self._effects.append(Reply(stream, kind, handoff_id, epoch, reason, detail))

    def state_text(self, handoff_id: bytes) -> str:
        """Returns the state of a handoff without staging, for error messages."""
        ended = self._ended.get(handoff_id)
        if ended is None:
            return "not known" if handoff_id not in self.live else "waiting for room"
        return f"{ended.state.name}{': ' if ended.detail else ''}{ended.detail}"
