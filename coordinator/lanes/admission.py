"""Whether a request is let in: limits, and what is predicted of its first token."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from functools import partial

from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.lanes.wait_correction import WaitCorrection
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES, Lane, lane_config
from baton.coordinator.state.requests import Prediction, Request, Submission
from baton.runtime import errors
from baton.runtime.config import LanesConfig
from baton.runtime.enum_names import lane_name
from baton.v1 import common_pb2

_RETRY_AFTER_S = 1.0
# So many of a lane's latest waits tell how others turn out.
_WINDOW = 256
# Seconds without a first token after which a fleet's predictions are considered stale.
_UNTRIED_S = 5.0
# Predictions are not wrong by more than that.
_MOST_WRONG = 30.0


@dataclass(frozen=True, slots=True)
class TtftForecast:
    """When a request that arrives would have its first token, and when it should; in seconds.

    Attributes:
        wanted_s: how soon after its arrival it should.
        passed_s: how long ago it arrived.
        prediction: how soon from now it would.
        ratio: how much longer than predicted the wait is taken to be.
        slot_s: how long it waits, before all that, until its tenant may have one more request
            running; None: the tenant may now.
    """

    wanted_s: float
    passed_s: float
    prediction: Prediction
    ratio: float
    slot_s: float | None

    @property
    def late_s(self) -> float:
        """How much later than wanted the first token would be; 0 or less: in time."""
        return self.passed_s + self._wait_s + self.prediction.work_s - self.wanted_s

    @property
    def tells(self) -> bool:
        """Whether what becomes of this request shows how good predictions are where they decide.

        That is where the wait is half of what would be too long, or more: there are such requests
        wherever there is a queue, whatever the ratio. A request that waits for others of its tenant
        tells nothing of other tenants' requests.
        """
        return self.slot_s is None and self._wait_s > 0 and self.late_s >= -self._wait_s

    @property
    def is_hopeless(self) -> bool:
        """Whether the first token would be late although the request waited for nobody."""
        return self.prediction.work_s > self.wanted_s

    def error(self) -> errors.BatonError:
        """Why a request that would be late is not let in, and when another try makes sense."""
        ttft_s = self.wanted_s + self.late_s
        what = f"the first token is predicted in {ttft_s:.3g} s; {self.wanted_s:.3g} s are wanted"
        if self.is_hopeless:
            what += f", and the prompt alone takes {self.prediction.work_s:.3g} s"
        return errors.ResourceExhausted(
            what, reason="TOO_LATE", retry_after_s=None if self.is_hopeless else self.late_s
        )

    @property
    def _wait_s(self) -> float:
        return self.prediction.wait_s * self.ratio + (self.slot_s or 0.0)


class Admission:
    """Refuses requests at once that there is no room for, or that would be late.

    Predictions of first tokens are wrong by what no model of the steps knows: the network, a
    machine's other work, who comes later and goes first. So what became of the latest predictions
    is kept by lane, and predicted waits are multiplied by what nearly all of them turned out to be.

    Args:
        config: limits and targets.
        lanes: what waits.
        placers: predict first tokens.

    Attributes:
        closing: why nothing is admitted any more; None while requests are admitted.
    """

    def __init__(self, config: CoreConfig, lanes: Lanes, placers: Placers) -> None:
        self._config, self._lanes, self._placers = config, lanes, placers
        self._ratios = {lane: WaitCorrection(_WINDOW) for lane in LANES}
        # When a fleet had its latest first token, or let in a request to measure what prompts take.
        self._tried_at: dict[Fleet, float] = {}
        self.closing: errors.Unavailable | None = None

    def error(self, lane: common_pb2.Lane.ValueType, num_requests: int) -> errors.BatonError | None:
        """Why no request of a lane would be admitted now; None when one would.

        Args:
            lane: the lane.
            num_requests: how many requests have not ended.
        """
        if self.closing is not None:
            return self.closing
        if num_requests >= self._config.max_running_requests:
            return errors.ResourceExhausted(
                f"{num_requests} requests are running; at most {self._config.max_running_requests}",
                reason="TOO_MANY_REQUESTS",
                retry_after_s=_RETRY_AFTER_S,
            )
        max_queued = lane_config(self._config.lanes, lane).max_queued
        if self._lanes.num_queued(lane) >= max_queued:
            return errors.ResourceExhausted(
                f"{self._lanes.num_queued(lane)} requests wait in the {lane_name(lane)} lane; "
                f"at most {max_queued}",
                reason="QUEUE_FULL",
                retry_after_s=self._place_s(lane),
            )
        return None

    def forecast(
        self, submission: Submission, hashes: array[int], fleet: Fleet, now: float
    ) -> TtftForecast | None:
        """When a request would have its first token, and when it should.

        Args:
            submission: the request, which is not queued.
            hashes: of its prompt's blocks.
            fleet: The fleet that it would run on.
            now: by the core's clock.

        Returns:
            None where the first token may come at any time, or nobody can tell when it would: no
            worker is there, or this one is to show whether prompts take as long as is predicted.
        """
        if len(submission.known_token_ids):
            return None
        wanted_s = _lane_ttft_s(self._config.lanes, submission)
        if submission.timeout_s is not None:
            wanted_s = min(submission.timeout_s, wanted_s or submission.timeout_s)
        if wanted_s is None:
            return None
        in_lane_s = partial(self._lanes.wait_s, submission, fleet)
        predictions = self._placers.of(fleet).predictions
        prediction = predictions.ttft(submission, hashes, in_lane_s)
        if prediction is None:
            return None
        passed_s = now - submission.arrived_at
        forecast = TtftForecast(
            wanted_s,
            passed_s,
            prediction,
            self.wait_correction(submission.lane),
            self._lanes.slot_wait_s(submission),
        )
        if forecast.is_hopeless and not prediction.wait_s and forecast.slot_s is None:
            # Were all refused, a prediction that is wrong would never be found out.
            tried_at = self._tried_at.get(fleet, -math.inf)
            may_be = prediction.work_s <= _MOST_WRONG * wanted_s
            if may_be and now - tried_at >= _UNTRIED_S:
                self._tried_at[fleet] = now
                return None
        return forecast

    def wait_correction(self, lane: Lane) -> float:
        """How much longer than predicted waits in a lane are taken to be; 1 to 4."""
        return self._ratios[lane].value

    def first_token(self, request: Request, now: float) -> None:
        """A first token comes now, or would not have come before: learns how good predictions are.

        A request whose attempt was lost tells nothing. What its own prompt takes longer than
        predicted counts as a longer wait: what is promised is their sum.
        """
        self._tried_at[request.fleet] = now
        prediction = request.prediction
        if prediction is not None and not request.interruptions:
            waited_s = now - request.submitted_at - prediction.work_s
            self._ratios[request.submission.lane].turned_out(waited_s, prediction.wait_s)

    def ended(self, request: Request, now: float) -> None:
        """A request ended: without a first token it is a late one, if it waited for too long."""
        prediction = request.prediction
        if prediction is None or request.first_token_at is not None:
            return
        if now - request.submitted_at > prediction.wait_s + prediction.work_s:
            self.first_token(request, now)

    def forget(self, fleet: Fleet) -> None:
        """Drops what is remembered of a fleet that has no requests."""
        self._tried_at.pop(fleet, None)

    def _place_s(self, lane: Lane) -> float:
        """When one of those that wait in a full lane will have left it, in seconds."""
        oldest = self._lanes.oldest(lane)
        if oldest is None:
            return _RETRY_AFTER_S
        # While it waited as many have left as wait now, if the lane was full all the time.
        waited_s = self._lanes.now - oldest.submitted_at
        return max(_RETRY_AFTER_S, waited_s / self._lanes.num_queued(lane))


def _lane_ttft_s(config: LanesConfig, submission: Submission) -> float | None:
    """The time to first token that a request should have at most; None: any will do."""
    if submission.slo_ttft_s is not None:
        return submission.slo_ttft_s
    target_ms = lane_config(config, submission.lane).ttft_ms
    return target_ms / 1e3 if target_ms else None
