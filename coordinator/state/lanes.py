"""The two lanes that a request can be submitted to."""

from __future__ import annotations

from typing import TypeAlias

from baton.runtime.config import LaneConfig, LanesConfig
from baton.v1 import common_pb2

Lane: TypeAlias = "common_pb2.Lane.ValueType"

LANES: tuple[Lane, ...] = (common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH)


def lane_config(config: LanesConfig, lane: Lane) -> LaneConfig:
    """The configuration of one lane."""
    return config.batch if lane == common_pb2.LANE_BATCH else config.interactive
