"""Interface of scaling policies; the default policy is `Autoscaler` in autoscaler.py."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.scaling.autoscale.types import Observation
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Decision


class Policy(Protocol):
    """Decides the pool sizes periodically.

    Attributes:
        config: targets and limits; the scaler may replace them at any time.
        interval_s: seconds between two decisions.
    """

    config: ScalingConfig
    interval_s: float

    def decide(self, observation: Observation, now: float) -> Decision: ...
