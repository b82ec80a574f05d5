"""Describes a lane's latency targets to operators."""

from __future__ import annotations

from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.scaling_config import Targets
from baton.v1 import admin_pb2


def lane_targets(lane: Lane, targets: Targets) -> admin_pb2.LaneTargets:
    """Returns the message of a lane's targets, without the longest gap; 0 means no target."""
    return admin_pb2.LaneTargets(
        lane=lane,
        ttft_ms=round((targets.ttft_s or 0) * 1e3),
        ttft_ms_per_1k_tokens=round(targets.ttft_s_per_1k_tokens * 1e3),
        itl_ms=round((targets.itl_s or 0) * 1e3),
        percentile=targets.percentile,
    )
