"""Number of workers that the load of a pool needs, before any limit of the pool applies."""

from __future__ import annotations

from typing import NamedTuple

from baton.coordinator.state.scaling_config import ScalingConfig

# Share of a latency target kept as safety margin.
TARGET_MARGIN = 0.04


class Need(NamedTuple):
    """Workers needed in a pool.

    Attributes:
        workers: number of workers; at least 0.
        reason: explanation for operators, with the numbers.
    """

    workers: int
    reason: str


def lanes_with_targets(config: ScalingConfig) -> list[str]:
    """Names of the lanes whose load makes the pools grow."""
    return [name for name, one in config.targets if one.ttft_s is not None or one.itl_s is not None]
