"""Compares the gaps between a request's tokens with their target."""

from __future__ import annotations

from collections.abc import Sequence

from baton.coordinator.core.parts import Parts
from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.slow_steps import SlowStep, Stall
from baton.coordinator.telemetry.stalls import stalls
from baton.v1 import common_pb2


class TokenGaps:
    """Finds the target of a gap, and the gaps of a request that exceed it."""

    def __init__(self, parts: Parts) -> None:
        self._targets, self._workers, self._placers = parts.targets, parts.workers, parts.placers

    def target_s(self, lane: common_pb2.Lane.ValueType) -> float | None:
        """Target of a single gap between a lane's tokens; None: the lane has no ITL target."""
        itl_s = self._targets.of_lane(lane).itl_s
        if itl_s is None or lane != common_pb2.LANE_INTERACTIVE:
            return itl_s
        return max(itl_s, self._placers.longest_gap_s or 0.0)

    def stalls(self, request: Request) -> tuple[Stall, ...]:
        """Returns the longest gaps between a request's tokens that exceed its target, up to now."""
        return stalls(request, self._targets.itl_s(request.submission), self._slow_steps)

    def _slow_steps(self, key: WorkerKey | None) -> Sequence[SlowStep]:
        worker = self._workers.get(key)
        return worker.slow_steps if worker is not None else ()
