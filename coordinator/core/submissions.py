"""Turns submissions into requests that wait in their lanes, or refuses them."""

from __future__ import annotations

import math
from array import array

from baton.coordinator.core.admission_check import AdmissionCheck, AdmissionResult
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.core.request_states import RequestStates
from baton.coordinator.state.requests import Request, Submission
from baton.runtime import errors


class Submissions:
    """Admits new and resumed submissions."""

    def __init__(self, parts: Parts, states: RequestStates, ends: RequestEnds) -> None:
        self._clock = parts.clock
        self._config, self._targets, self._requests = parts.config, parts.targets, parts.requests
        self._admission, self._stats, self._effects = parts.admission, parts.stats, parts.effects
        self._room_freed = parts.room_freed
        self._states, self._ends = states, ends
        self._check = AdmissionCheck(parts)

    def admit(self, submission: Submission, *, may_still_run: bool = False) -> Request | None:
        """Checks a submission and queues it, or refuses it with the reason.

        A request that was accepted before is not refused for its cost when its client resumes it.

        Args:
            submission: A new or resumed submission.
            may_still_run: Whether a worker may still run the request for an earlier coordinator.

        Returns:
            The queued request; None if it was refused or has taken over a running output.
        """
        older = self._requests.get(submission.key)
        if older is not None and self._takes_over(older, submission):
            return None
        try:
            result = self._check.check(submission, older, may_still_run=may_still_run)
        except errors.BatonError as error:
            self._effects.failed(submission, error)
            return None
        if older is not None:
            self._replace(older)
        request = self._new_request(submission, result)
        self._requests.add(request)
        self._stats.admitted(request, self._clock.now)
        self._effects.accepted(request)
        self._states.queue(request, result.num_tokens)
        self._states.set_timer(request)
        self._room_freed()
        return request

    # ---- Private methods

    def _new_request(self, submission: Submission, result: AdmissionResult) -> Request:
        now = self._clock.now
        forecast, before = result.forecast, self._requests.ended(submission.key)
        prediction = None
        if forecast is not None and forecast.is_informative:
            prediction = forecast.prediction
        return Request(
            submission=submission,
            submitted_at=now,
            deadline=self._deadline(submission),
            state_since=now,
            token_ids=array("I", submission.known_token_ids),
            text_chars=submission.known_text_chars,
            hashes=result.hashes if len(result.hashes) else None,
            fleet=result.fleet,
            prediction=prediction,
            is_resumed=result.is_resumed,
            attempts_before=before.attempt_number if before is not None else 0,
            due_at=self._due_at(submission),
            growth_s=self._targets.ttft_growth_s(submission),
        )

    def _due_at(self, submission: Submission) -> float:
        """Returns when the first token is due, by the core's clock; infinite without a target."""
        target_s = self._targets.ttft_s(submission)
        return math.inf if target_s is None else submission.arrived_at + target_s

    def _deadline(self, submission: Submission) -> float:
        """Returns when a request must end, by the core's clock."""
        life_s = self._config.max_request_s
        if submission.timeout_s is not None:
            life_s = min(life_s, submission.timeout_s)
        return submission.arrived_at + life_s

    def _takes_over(self, older: Request, submission: Submission) -> bool:
        """Connects a resuming client to the running output of its request, if that is necessary.

        It is necessary if no other worker could continue the output. The recent deltas then supply
        the tokens that the client has not received.

        Returns:
            Whether the client was connected.
        """
        if self._admission.closing is not None or not older.is_resumed_by(submission):
            return False
        if (lacking := older.lacking(submission)) is None:
            return False
        self._tell_resumed(older)
        self._requests.redirect(older, submission.to)
        self._effects.accepted(older)
        self._effects.deltas().extend((submission.to, encoded) for encoded in lacking)
        # The worker knows the older deadline.
        older.deadline = min(older.deadline, self._deadline(submission))
        self._states.set_timer(older)
        return True

    def _replace(self, older: Request) -> None:
        """Cancels the running request that a submission resumes; its session may still be open."""
        self._ends.replaced(older)
        self._tell_resumed(older)

    def _tell_resumed(self, older: Request) -> None:
        """Fails the older stream of a resumed request, so that its reader learns the reason."""
        reason = f"request {older.id} was resumed over another connection and continues there"
        self._effects.failed(older.submission, errors.Aborted(reason))
