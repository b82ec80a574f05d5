"""Ends requests: an output is complete, its client cancels, a time limit passes, an error comes."""

from __future__ import annotations

from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.ended_records import ended_request, outcome
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_states import RequestStates
from baton.coordinator.core.token_charges import TokenCharges
from baton.coordinator.core.token_gaps import TokenGaps
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import Request, RequestState
from baton.coordinator.telemetry.tail_sampling import TailSampler
from baton.runtime import errors
from baton.v1 import common_pb2


class RequestEnds:
    """Ends requests in any state: releases all that they hold, and remembers their records.

    Args:
        parts: The shared parts of the core.
        states: Change the states of requests.
        assignments: The workers of requests.
        charges: Charge tenants for output tokens.
        gaps: Finds gaps over their target.
    """

    def __init__(
        self,
        parts: Parts,
        states: RequestStates,
        assignments: Assignments,
        charges: TokenCharges,
        gaps: TokenGaps,
    ) -> None:
        self._clock = parts.clock
        self._config, self._targets, self._placers = parts.config, parts.targets, parts.placers
        self._requests, self._lanes, self._admission = parts.requests, parts.lanes, parts.admission
        self._timers, self._effects, self._commands = parts.timers, parts.effects, parts.commands
        self._stats, self._room_freed = parts.stats, parts.room_freed
        self._states, self._assignments = states, assignments
        self._charges, self._gaps = charges, gaps
        self._tail = TailSampler(parts.config.tail_share, parts.stats.recent)

    def finish(
        self, request: Request, reason: common_pb2.FinishReason.ValueType, stop: str
    ) -> None:
        """Ends a request whose output is complete.

        Args:
            request: A request that has not ended.
            reason: The finish reason.
            stop: Stop string or token id that ended the output; empty: none.
        """
        self._states.advance(request, RequestState.FINISHED)
        budget = self._end(request, finish_reason=reason)
        self._effects.finished(request, reason, stop, budget)

    def cancel(self, request: Request) -> None:
        """Cancels a request in any state, and tells its client.

        Args:
            request: A request that has not ended.
        """
        budget = self._cancel(request)
        self._effects.finished(request, common_pb2.FINISH_REASON_CANCELLED, "", budget)

    def replaced(self, request: Request) -> None:
        """Cancels a request that its client has submitted again; the caller tells the client."""
        self._cancel(request)

    def session_lost(self, request: Request) -> None:
        """Cancels a request in any state whose client session was lost; it may be resumed."""
        self._cancel(request, session_lost=True)

    def fail(self, request: Request, error: errors.BatonError) -> None:
        """Fails a request in any state and tells its client why."""
        self._states.advance(request, RequestState.FAILED)
        self._commands.cancel(request)
        self._end(request, error=error)
        self._effects.failed(request.submission, error)

    def expire(self, request: Request) -> bool:
        """Handles a request's timer: sets it again, or fails the request at its deadline.

        Args:
            request: A request that has not ended.

        Returns:
            Whether the request has waited for too long, so that it must not wait on as it does.
        """
        now = self._clock.now
        if self._states.set_timer(request) > now:
            return False
        if request.deadline > now:
            return True
        self.fail(request, self._overdue(request))
        return False

    # ---- Private methods

    def _overdue(self, request: Request) -> errors.BatonError:
        """Returns the error of a request whose deadline has passed."""
        submission = request.submission
        age_s = request.deadline - submission.arrived_at
        message = (
            f"request {request.id} did not end within {age_s:g} s; "
            f"it was {request.state.name.lower()}"
        )
        has_own = (
            submission.timeout_s is not None and submission.timeout_s <= self._config.max_request_s
        )
        if has_own or request.state is not RequestState.PARKED:
            return errors.DeadlineExceeded(message)
        # It lacked room, not time: when the cell is less busy, the same request may succeed.
        return errors.ResourceExhausted(message, reason="QUEUE_TIMEOUT", retry_after_s=1.0)

    def _cancel(self, request: Request, *, session_lost: bool = False) -> common_pb2.LatencyBudget:
        self._states.advance(request, RequestState.CANCELLED)
        self._commands.cancel(request)
        reason = common_pb2.FINISH_REASON_CANCELLED
        return self._end(request, finish_reason=reason, session_lost=session_lost)

    def _end(
        self,
        request: Request,
        *,
        finish_reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED,
        error: errors.BatonError | None = None,
        session_lost: bool = False,
    ) -> common_pb2.LatencyBudget:
        """Releases everything that an ended request holds, and remembers its record."""
        now = self._clock.now
        self._charges.charge_rest(request)
        self._lanes.ended(request)
        if error is None and finish_reason != common_pb2.FINISH_REASON_CANCELLED:
            self._placers.of(request.fleet).ended(request)
        self._admission.ended(request)
        if request.attempt:
            self._assignments.add_session_blocks(request)
        self._timers.cancel(request.key)
        self._assignments.release(request)
        self._requests.remove(request)
        self._room_freed()
        stalls = self._gaps.stalls(request)
        record = ended_request(
            request, now, self._targets, stalls, finish_reason, error, session_lost=session_lost
        )
        kept = self._tail.reason(record, now)
        if kept or request.submission.traceparent:
            self._effects.add(ev.ExportTrace(record, request.submission.traceparent, kept))
        self._requests.remember(request, record)
        self._stats.ended(request, record, outcome(record))
        return record.budget
