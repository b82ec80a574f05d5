"""Decides whether a submission is admitted, and which fleet computes it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from baton.coordinator.core.parts import Parts
from baton.coordinator.core.retries import Retries
from baton.coordinator.lanes.admission import TtftForecast
from baton.coordinator.lanes.lanes import TENANT_RATE
from baton.coordinator.routing.output_lengths import max_output_tokens
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import lane_config
from baton.coordinator.state.requests import EndedRequest, Request, Submission
from baton.runtime import errors


class AdmissionResult(NamedTuple):
    """Values that the admission check computed for an admitted submission.

    Attributes:
        num_tokens: Tokens of the prompt and of the longest possible output.
        fleet: The fleet that computes the request.
        hashes: Hashes of the prompt's blocks in that fleet.
        forecast: Predicted time to first token; None: no target, or no prediction.
        is_resumed: As in Request.
    """

    num_tokens: int
    fleet: Fleet
    hashes: array[int]
    forecast: TtftForecast | None
    is_resumed: bool


class AdmissionCheck:
    """Checks submissions against all limits, and counts arrived and shed requests."""

    def __init__(self, parts: Parts) -> None:
        self._clock, self._config = parts.clock, parts.config
        self._requests, self._workers, self._placers = parts.requests, parts.workers, parts.placers
        self._targets, self._traffic, self._lanes = parts.targets, parts.traffic, parts.lanes
        self._admission, self._stats = parts.admission, parts.stats
        self._retries = Retries()

    def check(
        self, submission: Submission, older: Request | None, *, may_still_run: bool
    ) -> AdmissionResult:
        """Checks a submission, chooses its fleet, and counts it as demand and as shed.

        Args:
            submission: A new or resumed submission.
            older: The running request of the same key, or None.
            may_still_run: Whether a worker may still run the request for an earlier coordinator.

        Raises:
            BatonError: The submission is refused.
        """
        now = self._clock.now
        num_tokens = len(submission.prompt_token_ids)
        num_tokens += max_output_tokens(submission, self._workers.max_model_len)
        refused = self._limit_error(submission, older, num_tokens, may_still_run=may_still_run)
        earlier = self._continued(submission, older)
        fleet = self._traffic.fleet_of(submission, earlier.revision if earlier is not None else "")
        hashes = self._placers.of(fleet).prompts.hashes(submission)
        forecast, growth_s = None, self._targets.ttft_growth_s(submission)
        if refused is None:
            forecast = self._admission.forecast(submission, hashes, fleet, growth_s)
            stable = self._traffic.stable
            if (
                fleet is not stable
                and stable.workers.model is not None
                and (_is_late(forecast) or self._fills_lane(fleet, submission))
            ):
                # A canary must not cause requests to be refused that stable workers can serve.
                canary, fleet = fleet, stable
                hashes = self._placers.of(fleet).prompts.hashes(submission)
                forecast = self._admission.forecast(submission, hashes, fleet, growth_s)
                if not _is_late(forecast):
                    self._stats.moved_to_stable(canary)
            if forecast is not None and _is_late(forecast):
                refused = forecast.error()
        shed = refused if isinstance(refused, errors.ResourceExhausted) else None
        is_wanted = shed is not None and shed.reason != TENANT_RATE
        if (refused is None or is_wanted) and not self._retries.repeats(submission, now):
            demand = self._placers.of(fleet).predictions.demand(submission, hashes)
            self._stats.demand[submission.lane].arrived(*demand)
        if shed is not None and is_wanted and shed.retry_after_s is not None:
            self._retries.refused(submission, shed.retry_after_s, now)
        if shed is not None:
            self._stats.shed(submission.lane, shed.reason, now)
        if refused is not None:
            raise refused
        # In another lane it waits like a new request: the batch lane would be a way to go first.
        is_resumed = (
            earlier.lane == submission.lane
            if earlier is not None
            else older is None and self._resumes(submission, may_still_run=may_still_run)
        )
        return AdmissionResult(num_tokens, fleet, hashes, forecast, is_resumed)

    def _fills_lane(self, canary: Fleet, submission: Submission) -> bool:
        """Whether requests for the canary take so many places in the lane that no more may wait.

        All fleets share the places of a lane, so a busy canary could take those of the stable one.
        """
        most = -(-lane_config(self._config.lanes, submission.lane).max_queued // 2)
        num_waiting = self._lanes.num_queued_for(submission.lane, canary)
        return not len(submission.known_token_ids) and num_waiting >= most

    def _limit_error(
        self,
        submission: Submission,
        older: Request | None,
        num_tokens: int,
        *,
        may_still_run: bool,
    ) -> errors.BatonError | None:
        """Returns why a limit other than the predicted TTFT refuses a submission, or None."""
        is_same = False
        if older is not None:
            # The submission either resumes the running request or repeats its id by mistake.
            if self._admission.closing is not None:
                return self._admission.closing
            if not older.is_resumed_by(submission):
                return errors.AlreadyExists(f"request {submission.request_id} is running")
            is_same = older.submission.digest == submission.digest
            # In another lane it needs a place there.
            if is_same and older.submission.lane == submission.lane:
                return None
        # A different request under the id of a running request replaces that request. It is limited
        # like a new request: a tenant could otherwise get around its rate limit.
        refused = self._admission.error(submission.lane, submission.tenant, older)
        if refused is not None:
            return refused
        if is_same:
            # Its tokens are reserved already.
            return None
        if older is None and self._resumes(submission, may_still_run=may_still_run):
            return None
        return self._lanes.rate_error(submission.tenant, num_tokens)

    def _resumes(self, submission: Submission, *, may_still_run: bool) -> bool:
        """Returns whether a submission resumes a request whose session or coordinator was lost.

        A request that its client cancelled does not count, and neither does a submission with
        another prompt or other parameters: both would get around the rate limit.
        """
        if (before := self._requests.ended(submission.key)) is None:
            return may_still_run
        return before.is_resumed_by(submission)

    def _continued(
        self, submission: Submission, older: Request | None
    ) -> Request | EndedRequest | None:
        """Returns the request that began the output of a resumed one; None: it is not known."""
        if older is not None:
            num_known, num_output = len(submission.known_token_ids), len(older.token_ids)
            is_same = num_known <= num_output and older.submission.digest == submission.digest
            return older if is_same else None
        before = self._requests.ended(submission.key)
        return before if before is not None and before.is_resumed_by(submission) else None


def _is_late(forecast: TtftForecast | None) -> bool:
    return forecast is not None and forecast.late_s > 0
