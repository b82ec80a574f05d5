"""Decides whether a request is admitted, by queue limits and its predicted time to first token."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import partial

from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.lanes.wait_correction import WaitCorrection
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES, Lane, lane_config
from baton.coordinator.state.requests import Prediction, Request, Submission
from baton.runtime import errors
from baton.runtime.enum_names import lane_name
from baton.v1 import common_pb2

_BATCH = common_pb2.LANE_BATCH
_MAX_KEY = "coordinator.max_running_requests"
# Shortest delay before a refused request should be tried again.
_RETRY_AFTER_S = 1.0
# Number of a lane's recent waits that correct predictions.
_WINDOW = 256
# Seconds without a first token after which a fleet's predictions are considered stale.
_STALE_S = 5.0
# Largest factor by which a prediction may be wrong.
_MAX_ERROR = 30.0


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """Predicted and target time to first token of an arriving request, in seconds.

    Attributes:
        target_s: Target, from the request's arrival.
        elapsed_s: Time since the request's arrival.
        prediction: Predicted wait and prefill time from now on.
        alone_s: Predicted time to compute the prompt on an idle worker. If the prefill time of
            `prediction` is within the target, it is that time, which is faster to predict.
        correction: Factor for the predicted wait, 1 to 4 (WaitCorrection).
        slot_s: Predicted wait for the tenant's concurrency limit, before the other wait; None: the
            tenant may run one more request now.
    """

    target_s: float
    elapsed_s: float
    prediction: Prediction
    alone_s: float
    correction: float
    slot_s: float | None

    @property
    def late_s(self) -> float:
        """How much the first token would miss the target, in seconds; 0 or less: in time."""
        return self.elapsed_s + self._wait_s + self.prediction.work_s - self.target_s

    @property
    def is_informative(self) -> bool:
        """Whether the actual wait of this request should correct later predictions.

        Only waits count that are at least half as long as the longest wait in time: predictions
        decide there, and every queue has such requests. A request that waits for its tenant's
        concurrency limit says nothing about other tenants' requests.
        """
        return self.slot_s is None and self._wait_s > 0 and self.late_s >= -self._wait_s

    @property
    def is_hopeless(self) -> bool:
        """Whether the prompt alone takes longer than the target, even on an idle worker."""
        return self.alone_s > self.target_s

    def error(self) -> errors.BatonError:
        """The error of a request that would be late, with the time after which to retry."""
        ttft_s = self.target_s + self.late_s
        what = f"predicted time to first token is {ttft_s:.3g} s, the target {self.target_s:.3g} s"
        if self.is_hopeless:
            what += f", and the prompt alone takes {self.alone_s:.3g} s"
        return errors.ResourceExhausted(
            what, reason="TOO_LATE", retry_after_s=None if self.is_hopeless else self.late_s
        )

    @property
    def _wait_s(self) -> float:
        return self.prediction.wait_s * self.correction + (self.slot_s or 0.0)


class Admission:
    """Refuses requests at once that find a full queue, or would miss their target.

    The latency model does not know the network, other load on a host, or later requests that go
    first. Each lane of a fleet therefore has a WaitCorrection, which scales predicted waits by the
    actual waits of recent requests.

    Args:
        config: Limits and targets.
        lanes: Waiting requests.
        placers: Predict times to first token.
        clock: Time of the event that the core handles.

    Attributes:
        closing: Why no request is admitted any more; None while requests are admitted.
    """

    def __init__(
        self, config: CoreConfig, lanes: Lanes, placers: Placers, clock: CoreClock
    ) -> None:
        self._config, self._lanes, self._placers, self._clock = config, lanes, placers, clock
        self._corrections: dict[Fleet, dict[Lane, WaitCorrection]] = {}
        # When a fleet had its latest first token, or last admitted a request to measure prompt
        # times.
        self._probed_at: dict[Fleet, float] = {}
        # Most batch requests that have not ended. They leave places for as many interactive ones as
        # may wait, but never more than half: a coordinator full of batch requests would refuse
        # interactive ones.
        most = config.max_running_requests
        self._max_batch = most - min(config.lanes.interactive.max_queued, most // 2)
        self.closing: errors.Unavailable | None = None

    def error(
        self, lane: common_pb2.Lane.ValueType, tenant: str, replaced: Request | None = None
    ) -> errors.BatonError | None:
        """Returns why no request of a tenant is admitted to a lane now; None if one is.

        Args:
            lane: The lane.
            tenant: The tenant.
            replaced: A request that has not ended, and ends when this one is admitted.
        """
        if self.closing is not None:
            return self.closing
        num_open = {one: self._lanes.num_open(one) for one in LANES}
        if replaced is not None:
            num_open[replaced.submission.lane] -= 1
        most = self._config.max_running_requests
        if (num := sum(num_open.values())) >= most:
            return _too_many(f"{num} requests wait or run; at most {most} ({_MAX_KEY})")
        num, max_batch = num_open[lane], self._max_batch
        if lane == _BATCH and num >= max_batch:
            told = f"{num} batch requests wait or run; at most {max_batch} of {most} ({_MAX_KEY})"
            return _too_many(told)
        if not self._lanes.has_room(lane, tenant):
            num = self._lanes.num_queued(lane)
            return queue_full(
                f"{num} requests wait in the {lane_name(lane)} lane",
                num,
                self._lanes.num_queued_of(lane, tenant),
                tenant,
                lane_config(self._config.lanes, lane).max_queued,
                self._retry_after_s(lane),
            )
        return None

    def forecast(
        self,
        submission: Submission,
        hashes: array[int],
        fleet: Fleet,
        growth_s: float,
    ) -> TtftForecast | None:
        """Predicts the time to first token of a request.

        Args:
            submission: The request, which is not queued.
            hashes: Hashes of its prompt's blocks.
            fleet: The fleet that it would run on.
            growth_s: As Request.growth_s.

        Returns:
            None if the request has no target, the fleet has no worker, or the request is admitted
            to measure whether prompts take as long as predicted.
        """
        now = self._clock.now
        if len(submission.known_token_ids):
            return None
        target_s = submission.ttft_target_s(lane_config(self._config.lanes, submission.lane).ttft)
        if submission.timeout_s is not None:
            target_s = min(submission.timeout_s, target_s or submission.timeout_s)
        if target_s is None:
            return None
        in_lane_s = partial(self._lanes.waits.turn_s, submission, fleet, growth_s, now)
        predictions = self._placers.of(fleet).predictions
        prediction = predictions.ttft(submission, hashes, in_lane_s)
        if prediction is None:
            return None
        alone_s = prediction.work_s
        seems_too_long = alone_s > target_s
        if seems_too_long:
            alone_s = min(alone_s, predictions.alone_s(submission, hashes))
        elapsed_s = now - submission.arrived_at
        forecast = TtftForecast(
            target_s,
            elapsed_s,
            prediction,
            alone_s,
            self.wait_correction(submission.lane, fleet),
            self._lanes.waits.slot_s(submission, now),
        )
        if seems_too_long and not prediction.wait_s and forecast.slot_s is None:
            # If all such requests were refused, a wrong prediction would never be corrected.
            probed_at = self._probed_at.get(fleet, -math.inf)
            may_be_wrong = prediction.work_s <= _MAX_ERROR * target_s
            if may_be_wrong and now - probed_at >= _STALE_S:
                self._probed_at[fleet] = now
                return None
        return forecast

    def wait_correction(self, lane: Lane, fleet: Fleet) -> float:
        """Returns the factor for predicted waits of a lane's requests for a fleet, 1 to 4."""
        corrections = self._corrections.get(fleet)
        return corrections[lane].value if corrections is not None else 1.0

    def first_token(self, request: Request) -> None:
        """Corrects later predictions by a first token that comes now, or is late already.

        Requests whose attempt was lost are ignored. Prefill time beyond the prediction counts as a
        longer wait, because the target is for their sum.
        """
        now = self._clock.now
        self._probed_at[request.fleet] = now
        prediction = request.prediction
        if prediction is not None and not request.interruptions:
            waited_s = now - request.submitted_at - prediction.work_s
            if (corrections := self._corrections.get(request.fleet)) is None:
                corrections = {lane: WaitCorrection(_WINDOW) for lane in LANES}
                self._corrections[request.fleet] = corrections
            corrections[request.submission.lane].observe(waited_s, prediction.wait_s)

    def ended(self, request: Request) -> None:
        """Counts a request that ended without a first token, if it was later than predicted."""
        prediction = request.prediction
        if prediction is None or request.first_token_at is not None:
            return
        if self._clock.now - request.submitted_at > prediction.wait_s + prediction.work_s:
            self.first_token(request)

    def forget(self, fleet: Fleet) -> None:
        """Drops what is remembered of a fleet that has no requests."""
        self._probed_at.pop(fleet, None)
        self._corrections.pop(fleet, None)

    def _retry_after_s(self, lane: Lane) -> float:
        """Predicts when a request will leave a full lane, in seconds."""
        oldest = self._lanes.oldest(lane)
        if oldest is None:
            return _RETRY_AFTER_S
        # If the lane was full all the time, as many requests left during its wait as wait now.
        waited_s = self._clock.now - oldest.state_since
        return max(_RETRY_AFTER_S, waited_s / self._lanes.num_queued(lane))


def queue_full(
    what: str, num: int, num_of_tenant: int, tenant: str, max_queued: int, retry_after_s: float
) -> errors.ResourceExhausted:
    """Returns the error for a request that finds no place in a queue (FairPlaces).

    Args:
        what: What fills the queue, with its number.
        num: Number of places that are taken.
        num_of_tenant: Number of places that the request's tenant has.
        tenant: The tenant.
        max_queued: Number of places; more are given only to tenants below their share.
        retry_after_s: Time after which a client may retry, in seconds.
    """
    shared = limit = ""
    if num_of_tenant != num:
        shared, limit = f", {num_of_tenant} of them of tenant {tenant!r}", ", or its share of them"
    return errors.ResourceExhausted(
        f"{what}{shared}; at most {max_queued}{limit}",
        reason="QUEUE_FULL",
        retry_after_s=retry_after_s,
    )


def _too_many(what: str) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(what, reason="TOO_MANY_REQUESTS", retry_after_s=_RETRY_AFTER_S)
