"""The handoffs on their way to one worker: their staging, their streams, and how they end.

What their frames say is the receiver's business (receiver.py); pure and synchronous like it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from baton.kvtransfer.arena import Arena, ArenaStatistics
from baton.kvtransfer.errors import NoRoom
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.receiving import (
    SENDER_AT_WORK,
    TRANSITIONS,
    Changed,
    Effect,
    Handoff,
    ReceiverLimits,
    ReceiverStatistics,
    ReceiveState,
    Reply,
    changed,
)
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState


class HandoffTable:
    """Handoffs that are live, that wait for room, and, for a while, that are over.

    What happens to them is told by effects, taken with `take_effects`.

    Args:
        arena: of the receiving half of the segment; this object is its only user.

    Attributes:
        live: by id; changed here alone.
        streams: which handoff each stream carries.
    """

    def __init__(self, arena: Arena, limits: ReceiverLimits) -> None:
        self._arena, self._limits = arena, limits
        self.live: dict[bytes, Handoff] = {}
        self.streams: dict[int, bytes] = {}
        # First come, first served; the value is not used.
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._ended: OrderedDict[bytes, Changed] = OrderedDict()
        # To be claimed for every rank as soon as they are committed; the value is not used.
        self._ahead: OrderedDict[bytes, None] = OrderedDict()
        self._effects: list[Effect] = []
        self.statistics = ReceiverStatistics()

    def of_stream(self, stream: int) -> Handoff | None:
        """The live handoff that a stream carries."""
        return self.live.get(self.streams.get(stream, b""))

    def why_ended(self, handoff_id: bytes) -> tuple[pb.RefusalReason.ValueType, str] | None:
        """Why a handoff takes nothing more; None unless it is over and remembered."""
        ended = self._ended.get(handoff_id)
        if ended is None:
            return None
        if ended.state is _S.RELEASED:
            return pb.REFUSAL_REASON_UNKNOWN_HANDOFF, "it was loaded or released already"
        return ended.reason, f"it has failed already: {ended.detail}"

    def take_effects(self) -> list[Effect]:
        """Effects since they were taken last."""
        effects, self._effects = self._effects, []
        return effects

    def expire(self, now: float) -> None:
        """Ends every handoff whose state has lasted too long."""
        for handoff in [each for each in self.live.values() if each.deadline <= now]:
            if handoff.state is _S.QUEUED and handoff.handoff_id in self._queue:
                detail = "no room in the receiver's staging in time"
                self.fail(handoff, pb.REFUSAL_REASON_NO_ROOM, detail, now)
            elif handoff.problem is not None and handoff.deadline <= now:
                self.fail(handoff, *handoff.problem, now)
            elif handoff.deadline <= now:
                self.statistics.num_expired += 1
                detail = f"{handoff.state.name} for too long"
                self.fail(handoff, pb.REFUSAL_REASON_EXPIRED, detail, now)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return min((handoff.deadline for handoff in self.live.values()), default=None)

    def known(self) -> Iterator[Changed]:
        """The state of every handoff that is live or remembered."""
        yield from self._ended.values()
        for handoff in self.live.values():
            yield changed(handoff)

    def arena_statistics(self) -> ArenaStatistics:
        """Usage of this side's staging."""
        return self._arena.statistics()

    @property
    def num_live(self) -> int:
        return len(self.live)

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait for room."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the live handoffs hold what they should."""
        self._arena.check_integrity()
        holding = [handoff for handoff in self.live.values() if handoff.extent is not None]
        assert self._arena.statistics().num_extents == len(holding)
        for handoff in self.live.values():
            assert (handoff.state is _S.QUEUED) == (handoff.extent is None), handoff
            assert (handoff.state is _S.QUEUED) == (handoff.handoff_id in self._queue), handoff
            assert handoff.handoff_id not in self._ended, handoff
            if handoff.stream is not None:
                assert self.streams[handoff.stream] == handoff.handoff_id, handoff
        assert all(handoff_id in self.live for handoff_id in self._queue)
        for stream, handoff_id in self.streams.items():
            assert self.live[handoff_id].stream == stream, (stream, handoff_id)
        assert len(self._ended) <= self._limits.max_tombstones
        assert len(self._ahead) <= self._limits.max_tombstones
        assert self._ahead.keys().isdisjoint(self._ended)

    def claim_when_committed(self, handoff_id: bytes) -> None:
        """Remembers that it is claimed ahead; one that is over stays as it is."""
        if handoff_id not in self._ended:
            self._ahead[handoff_id] = None
            if len(self._ahead) > self._limits.max_tombstones:
                self._ahead.popitem(last=False)

    def is_claimed_ahead(self, handoff_id: bytes) -> bool:
        return handoff_id in self._ahead

    def why_no_room(
        self, num_bytes: int, live: Handoff | None
    ) -> tuple[pb.RefusalReason.ValueType, str] | None:
        """Why waiting for so many bytes is in vain; None: they are free, or may be soon."""
        if not self._arena.fits_ever(num_bytes):
            total = self._arena.statistics().total_bytes
            detail = f"handoff of {num_bytes} bytes; the receiver's staging has {total}"
            return pb.REFUSAL_REASON_TOO_LARGE, detail
        if live is None and len(self._queue) >= self._limits.max_queued:
            detail = f"{len(self._queue)} handoffs wait for room already"
            return pb.REFUSAL_REASON_NO_ROOM, detail
        return None

    def add(self, handoff: Handoff) -> None:
        """Adds a new handoff, without room and without a stream."""
        self.live[handoff.handoff_id] = handoff

    def carry(self, handoff: Handoff, stream: int) -> None:
        """The handoff's frames come on this stream from now on, and on no other."""
        if handoff.stream is not None:
            del self.streams[handoff.stream]
        handoff.stream, self.streams[stream] = stream, handoff.handoff_id

    def lose(self, stream: int) -> Handoff | None:
        """The stream is over; returns the live handoff that it carried."""
        handoff = self.live.get(self.streams.pop(stream, b""))
        if handoff is not None:
            handoff.stream = None
        return handoff

    def reserve(self, handoff: Handoff, num_bytes: int, wait_s: float, now: float) -> None:
        """Reserves staging for a handoff, or lets it wait in line for as long as it may."""
        if handoff.extent is not None and handoff.num_bytes != num_bytes:
            self._arena.free(handoff.extent)
            handoff.extent = None
        handoff.num_bytes = num_bytes
        if handoff.extent is not None:
            self._receive(handoff, now)
            return
        handoff.deadline = now + min(wait_s, self._limits.max_wait_s)
        self._queue.setdefault(handoff.handoff_id)
        self._admit(now)
        if handoff.extent is None:
            self.advance(handoff, _S.QUEUED)

    def tell(self, effect: Effect) -> None:
        """Adds an effect."""
        self._effects.append(effect)

    def _admit(self, now: float) -> None:
        """Gives room to those that wait, in their order: a large one is not overtaken."""
        while self._queue:
            handoff = self.live[next(iter(self._queue))]
            try:
                handoff.extent = self._arena.allocate(handoff.num_bytes)
            except NoRoom:
                return
            del self._queue[handoff.handoff_id]
            self._receive(handoff, now)

    def _receive(self, handoff: Handoff, now: float) -> None:
        handoff.deadline = now + self._limits.idle_timeout_s
        self.advance(handoff, _S.RECEIVING)
        self.reply(handoff, pb.PushReply.KIND_OPENED)

    def interrupt(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """The epoch is over; the sender may open the next one in the same room."""
        self.refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        handoff.problem = reason, detail
        handoff.deadline = now + self._limits.retry_timeout_s
        self.advance(handoff, _S.INTERRUPTED)

    def fail(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        self.statistics.num_failed += 1
        self.end(handoff, _S.FAILED, reason, detail, now)

    def give_up(
        self, handoff_id: bytes, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Fails it here, also before its open; one that has ended stays as it is."""
        if (handoff := self.live.get(handoff_id)) is not None:
            self.fail(handoff, reason, detail, now)
        elif handoff_id not in self._ended:
            self.bury(Changed(handoff_id, 0, _S.FAILED, reason=reason, detail=detail))

    def end(
        self,
        handoff: Handoff,
        state: ReceiveState,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
    ) -> None:
        """The one way a handoff ends: frees its staging, tells everybody, admits the next."""
        if handoff.state in SENDER_AT_WORK and handoff.stream is not None:
            self.refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        if handoff.stream is not None:
            del self.streams[handoff.stream]
        self.advance(handoff, state, quiet=True)
        if handoff.extent is not None:
            self._arena.free(handoff.extent)
            handoff.extent = None
        self._queue.pop(handoff.handoff_id, None)
        del self.live[handoff.handoff_id]
        if state is _S.RELEASED:
            reason, detail = pb.REFUSAL_REASON_UNSPECIFIED, ""
        self.bury(changed(handoff, reason, detail))
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
        """An open that cannot be: the handoff is over, also as it was in an older epoch."""
        self.refuse(stream, frame.handoff_id, frame.epoch, reason, detail)
        if live is not None:
            if live.stream == stream:
                del self.streams[stream]
                live.stream = None
            self.fail(live, reason, detail, now)
        else:
            self.statistics.num_failed += 1
            self.bury(
                Changed(frame.handoff_id, frame.epoch, _S.FAILED, reason=reason, detail=detail)
            )

    def bury(self, ended: Changed) -> None:
        self._ahead.pop(ended.handoff_id, None)
        self._ended[ended.handoff_id] = ended
        if len(self._ended) > self._limits.max_tombstones:
            self._ended.popitem(last=False)
        self._effects.append(ended)

    def advance(self, handoff: Handoff, state: ReceiveState, *, quiet: bool = False) -> None:
        if state not in TRANSITIONS[handoff.state]:
            raise AssertionError(f"{handoff.state.name} to {state.name} is not in the table")
        handoff.state = state
        if not quiet:
            self._effects.append(changed(handoff))

    def reply(self, handoff: Handoff, kind: pb.PushReply.Kind.ValueType) -> None:
        if handoff.stream is not None:
            reply = Reply(handoff.stream, kind, handoff.handoff_id, handoff.epoch)
            if kind == pb.PushReply.KIND_OPENED:
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
        self.statistics.refusals[reason] += 1
        if stream is not None:
            kind = pb.PushReply.KIND_REFUSED
            self._effects.append(Reply(stream, kind, handoff_id, epoch, reason, detail))

    def state_in_words(self, handoff_id: bytes) -> str:
        ended = self._ended.get(handoff_id)
        if ended is None:
            return "not known" if handoff_id not in self.live else "waiting for room"
        return f"{ended.state.name}{': ' if ended.detail else ''}{ended.detail}"
