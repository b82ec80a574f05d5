"""The sends of one worker: their staging, their epochs, and how they end.

sender.py decides what to do with each call; this table carries it out. Pure and synchronous.
"""

from __future__ import annotations

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.service.send_state import (
    OVER,
    TRANSITIONS,
    Effect,
    NotReserved,
    Reserved,
    Send,
    SenderLimits,
    SenderStatistics,
    SenderTransports,
    SendState,
    StartStream,
    StopStream,
    Wake,
    ended,
)
from baton.kvtransfer.service.staging_queue import StagingQueue
from baton.v1 import kv_transfer_pb2 as pb

_S = SendState


class SendTable:
    """The sends that are live, wait for staging, or are over while their extent is still in use.

    Args:
        arena: Arena of the sending half of the segment; this object is its only user.
        limits: How long each state may last.
        transports: The transports that may carry handoffs.

    Attributes:
        sends: By handoff ID. A send that is over stays while the engine may write to its extent.
        queue: The sends that wait for staging.
        statistics: Counts since the service started.
    """

    def __init__(self, arena: Arena, limits: SenderLimits, transports: SenderTransports) -> None:
        self._limits, self._transports = limits, transports
        self.sends: dict[bytes, Send] = {}
        self.queue = StagingQueue(arena)
        self._effects: list[Effect] = []
        self.statistics = SenderStatistics()

    def add_effect(self, effect: Effect) -> None:
        """Adds an effect."""
        self._effects.append(effect)

    def take_effects(self) -> list[Effect]:
        """Returns the effects since they were taken last."""
        effects, self._effects = self._effects, []
        return effects

    def expire(self, now: float) -> None:
        """Ends sends whose state has lasted too long, and frees extents kept for their writers."""
        for send in [each for each in self.sends.values() if each.deadline <= now]:
            if send.state in OVER:
                self.forget(send, now)
            elif send.deadline > now:
                continue
            elif send.state is _S.WAITING:
                self.fail(send, pb.REFUSAL_REASON_NO_ROOM, "no room in the sender's staging", now)
            else:
                self.statistics.num_expired += 1
                detail = f"{send.target}: {send.state.value} for too long"
                self.fail(send, pb.REFUSAL_REASON_EXPIRED, detail, now, farewell=True)

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which `expire` may have something to do."""
        return min((send.deadline for send in self.sends.values()), default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the known sends hold extents and queue places."""
        holding = [send for send in self.sends.values() if send.extent is not None]
        self.queue.check_integrity(len(holding))
        for send in self.sends.values():
            assert (send.state is _S.WAITING) == (send.extent is None), send
            assert (send.state is _S.WAITING) == (send.handoff_id in self.queue), send
        waiting = [send for send in self.sends.values() if send.state is _S.WAITING]
        assert len(self.queue) == len(waiting)

    def admit(self, now: float) -> None:
        """Gives staging to waiting sends and begins to open them."""
        for handoff_id, extent in self.queue.admit():
            send = self.sends[handoff_id]
            send.extent, send.reserved_at = extent, now
            self._effects.append(Reserved(send.handoff_id, extent.offset))
            self._effects.append(StartStream(send.handoff_id, send.target))
            self._reopen(send, now)

    def fall_back(
        self, send: Send, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Sends the same bytes again on another transport: that of this epoch has failed."""
        send.tried.add(send.transport)
        if not self._transports.offers(send.target, send.tried):
            self.fail(send, reason, detail, now, farewell=True)
            return
        self.statistics.num_fallbacks[send.transport] += 1
        send.num_fallbacks += 1
        self.next_epoch(send, now)

    def next_epoch(self, send: Send, now: float) -> None:
        """Opens a send again, to send everything from the first byte."""
        send.epoch += 1
        self._reopen(send, now)

    def _reopen(self, send: Send, now: float) -> None:
        self.advance(send, _S.OPENING)
        send.totals = [Totals()] * len(send.totals)
        send.num_commits = send.num_sent = send.num_frames = 0
        send.transport = ""
        send.open_due = True
        send.deadline = max(send.wait_until, now) + self._limits.reply_grace_s
        self._effects.append(Wake(send.handoff_id))

    def fail(
        self,
        send: Send,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
        *,
        farewell: bool = False,
    ) -> None:
        """Ends a send that failed; `farewell` tells the receiver so on the stream."""
        self.end(send, _S.FAILED, now, detail, reason, farewell=farewell)

    def end(
        self,
        send: Send,
        state: SendState,
        now: float,
        detail: str,
        reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
        *,
        farewell: bool = False,
    ) -> None:
        """Ends a send, the only way it ends. Its staging is freed once its writer has stopped."""
        if send.state is _S.WAITING:
            self.queue.remove(send.handoff_id)
            self._effects.append(NotReserved(send.handoff_id, reason, detail))
        else:
            goodbye = None
            if farewell:
                goodbye = frames.encode(FrameKind.ABORT, send.handoff_id, send.epoch)
            self._effects.append(StopStream(send.handoff_id, goodbye))
            if state is not _S.ABORTED:
                self._effects.append(ended(send, state, reason, detail, now))
        if state is _S.COMMITTED:
            self.statistics.num_committed[send.transport] += 1
        self.statistics.num_failed += state is _S.FAILED
        self.advance(send, state)
        send.filled.clear()
        # An abort comes after the engine was told to stop writing. The engine is not told of any
        # other end, and may write for as long as its request runs.
        is_aborted = state is _S.ABORTED
        send.deadline = now + (self.linger_s(send) if is_aborted else self._limits.writer_timeout_s)
        if send.extent is None or not send.writers:
            self.forget(send, now)

    def linger_s(self, send: Send) -> float:
        """Returns how long the extent of an aborted send stays reserved for its writers."""
        has_stages = any(stage for _, stage in send.writers)
        return self._limits.stages_linger_s if has_stages else self._limits.linger_s

    def forget(self, send: Send, now: float) -> None:
        """Frees the extent of a send that is over, and admits the next."""
        if send.extent is not None:
            self.queue.free(send.extent)
            send.extent = None
        del self.sends[send.handoff_id]
        self.admit(now)

    def advance(self, send: Send, state: SendState) -> None:
        """Moves a send to a state. Raises AssertionError unless the table allows the move."""
        if state not in TRANSITIONS[send.state]:
            raise AssertionError(f"{send.state.name} to {state.name} is not in the table")
        send.state = state
