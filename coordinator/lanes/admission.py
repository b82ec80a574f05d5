"""Whether a request is let in: limits, and what is predicted of its first token."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import partial

from baton.coordinator.core.core_config import CoreConfig
from baton.coordinator.core.request import Prediction, Request, Submission
from baton.coordinator.lanes.lanes import LANES, Lanes, lane_config
from baton.coordinator.lanes.tenants import Lane
from baton.coordinator.lanes.wait_ratio import WaitRatio
from baton.coordinator.routing.placers import Placers
from baton.runtime import errors
from baton.runtime.config import LanesConfig
from baton.runtime.enum_names import lane_name
from baton.v1 import common_pb2

_RETRY_AFTER_S = 1.0
# So many of a lane's latest waits tell how others turn out.
_WINDOW = 256


@dataclass(frozen=True, slots=True)
class Outlook:
    """A request's first token as it is seen when it arrives; times in seconds.

    Attributes:
        wanted_s: from its arrival.
        passed_s: since then.
        prediction: from now on.
        ratio: of waits to what was predicted of them, that is reckoned with.
        slot_s: before all that: its tenant has as many requests running as it may. None: it has
            not.
    """

    wanted_s: float
    passed_s: float
    prediction: Prediction
    ratio: float
    slot_s: float | None

    @property
    def late_s(self) -> float:
        """How much later than wanted it would be; not positive: it is in time."""
        return self.passed_s + self._wait_s + self.prediction.work_s - self.wanted_s

    @property
    def tells(self) -> bool:
        """Whether the wait is long enough to show how good predictions are where they decide.

        Half of what would be too long. So there are such requests wherever there is a queue,
        whatever the ratio. One that waits for others of its tenant tells nothing of the others.
        """
        return self.slot_s is None and self._wait_s > 0 and self.late_s >= -self._wait_s

    def error(self) -> errors.BatonError:
        """Why it is not let in."""
        ttft_s = self.wanted_s + self.late_s
        return errors.ResourceExhausted(
            f"the first token is predicted in {ttft_s:.3g} s; {self.wanted_s:.3g} s are wanted",
            reason="TOO_LATE",
            retry_after_s=self.late_s,
        )

    @property
    def _wait_s(self) -> float:
        return self.prediction.wait_s * self.ratio + (self.slot_s or 0.0)


class Admission:
    """Says no early.

    Requests are promised a time for their first token. What is predicted is wrong by what no model
    of the steps knows: the network, a machine's other work, who comes later and goes first. So what
    became of the latest predictions is kept, and waits are reckoned with as nearly all of these
    turned out.

    Attributes:
        closing: why nothing is admitted any more; None: it is.
    """

    def __init__(self, config: CoreConfig, lanes: Lanes, placers: Placers) -> None:
        self._config, self._lanes, self._placers = config, lanes, placers
        self._ratios = {lane: WaitRatio(_WINDOW) for lane in LANES}
        self.closing: errors.Unavailable | None = None

    def error(self, lane: common_pb2.Lane.ValueType, num_requests: int) -> errors.BatonError | None:
        """Why no request would be admitted now, whoever's; None when one would.

        Args:
            lane: to be joined.
            num_requests: that have not ended.
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
                retry_after_s=_RETRY_AFTER_S,
            )
        return None

    def outlook(
        self, submission: Submission, hashes: array[int], revision: str, now: float
    ) -> Outlook | None:
        """Of its first token; None when it may come at any time, or nobody knows."""
        if len(submission.known_token_ids):
            return None
        wanted_s = _lane_ttft_s(self._config.lanes, submission)
        if submission.timeout_s is not None:
            wanted_s = min(submission.timeout_s, wanted_s or submission.timeout_s)
        if wanted_s is None:
            return None
        in_lane_s = partial(self._lanes.wait_s, submission, revision)
        predictions = self._placers.of(revision).predictions
        prediction = predictions.ttft(submission, hashes, in_lane_s)
        if prediction is None:
            return None
        passed_s = now - submission.arrived_at
        return Outlook(
            wanted_s,
            passed_s,
            prediction,
            self.wait_ratio(submission.lane),
            self._lanes.slot_wait_s(submission),
        )

    def wait_ratio(self, lane: Lane) -> float:
        """How much longer than predicted a wait in a lane is reckoned with."""
        return self._ratios[lane].value

    def first_token(self, request: Request, now: float) -> None:
        """It comes now, or would not have come before: shows how good the prediction was.

        Of a request whose attempt was lost nothing was predicted. What its own prompt takes longer
        than predicted counts as a longer wait, too: what is promised is their sum, and without
        that fewer were in time.
        """
        prediction = request.prediction
        if prediction is not None and not request.interruptions:
            waited_s = now - request.submitted_at - prediction.work_s
            self._ratios[request.submission.lane].turned_out(waited_s, prediction.wait_s)

    def ended(self, request: Request, now: float) -> None:
        """It ended. Without a first token it is one of the late ones, if it waited for too long."""
        prediction = request.prediction
        if prediction is None or request.first_token_at is not None:
            return
        if now - request.submitted_at > prediction.wait_s + prediction.work_s:
            self.first_token(request, now)


def _lane_ttft_s(config: LanesConfig, submission: Submission) -> float | None:
    """The time to first token that a request is to have at most; None: no opinion."""
    if submission.slo_ttft_s is not None:
        return submission.slo_ttft_s
    target_ms = lane_config(config, submission.lane).ttft_ms
    return target_ms / 1e3 if target_ms else None
