"""Owns the latency targets of the lanes, which an operator may change while the coordinator runs.

The scaler passes them to its policy, step control makes the targets of the workers' steps from
them, and the core finds out by them when requests are due. `CoreConfig.targets` has the targets at
the start.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import Submission
from baton.coordinator.state.scaling_config import Targets, in_seconds
from baton.runtime.config import LaneTargetsConfig
from baton.runtime.enum_names import lane_name
from baton.v1 import common_pb2

_INTERACTIVE, _BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH


class LatencyTargets:
    """Latency targets by lane; only the core changes them.

    Args:
        config: Targets at the start.
    """

    def __init__(self, config: LaneTargetsConfig) -> None:
        self._by_lane: Mapping[str, Targets] = {
            lane_name(_INTERACTIVE): in_seconds(config.interactive),
            lane_name(_BATCH): in_seconds(config.batch),
        }

    @property
    def by_lane(self) -> Mapping[str, Targets]:
        """Targets of requests that name none, by name of the lane; each change makes a new one."""
        return self._by_lane

    def of_lane(self, lane: Lane) -> Targets:
        """Targets of a lane's requests that name none."""
        return self._by_lane[lane_name(_BATCH if lane == _BATCH else _INTERACTIVE)]

    def change(self, targets: Mapping[str, Targets]) -> None:
        """Changes the targets of some lanes."""
        self._by_lane = {**self._by_lane, **targets}

    # ---- Targets of single requests

    def ttft_s(self, submission: Submission) -> float | None:
        """Target for the request's time to first token; None: no target."""
        return submission.ttft_target_s(self.of_lane(submission.lane).ttft)

    def ttft_growth_s(self, submission: Submission) -> float:
        """The part of the request's TTFT target that grows with its prompt, in seconds."""
        return submission.ttft_growth_s(self.of_lane(submission.lane).ttft)

    def itl_s(self, submission: Submission) -> float | None:
        """Target for the gap between the request's tokens; None: no target."""
        return submission.slo_itl_s or self.of_lane(submission.lane).itl_s
