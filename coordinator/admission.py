"""Whether a request is let in: limits, and what is predicted of its first token."""

from __future__ import annotations

from array import array

from baton.coordinator.core_config import CoreConfig
from baton.coordinator.lanes import Lanes, lane_config
from baton.coordinator.placement import lane_ttft_s
from baton.coordinator.placers import Placers
from baton.coordinator.request import Submission
from baton.runtime import errors
from baton.runtime.enum_names import lane_name
from baton.v1 import common_pb2

_RETRY_AFTER_S = 1.0


class Admission:
    """Says no early.

    Attributes:
        closing: why nothing is admitted any more; None: it is.
    """

    def __init__(self, config: CoreConfig, lanes: Lanes, placer: Placers) -> None:
        self._config, self._lanes, self._placer = config, lanes, placer
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

    def lateness_error(
        self, submission: Submission, hashes: array[int], revision: str, now: float
    ) -> errors.BatonError | None:
        """Why it would come too late, by what is known now; None when it would not."""
        if len(submission.known_token_ids):
            return None
        wanted_s = lane_ttft_s(self._config.lanes, submission)
        if submission.timeout_s is not None:
            wanted_s = min(submission.timeout_s, wanted_s or submission.timeout_s)
        if wanted_s is None:
            return None
        predicted_s = self._placer.predicted_ttft_s(submission, hashes, revision)
        if predicted_s is None:
            return None
        predicted_s += now - submission.arrived_at
        late_s = predicted_s - wanted_s
        if late_s <= 0:
            return None
        return errors.ResourceExhausted(
            f"the first token is predicted in {predicted_s:.3g} s; {wanted_s:.3g} s are wanted",
            reason="TOO_LATE",
            retry_after_s=late_s,
        )
