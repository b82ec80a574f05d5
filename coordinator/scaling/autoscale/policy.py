"""Interface of scaling policies; the default policy is `Autoscaler` in autoscaler.py."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.scaling.autoscale.types import Observation
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Decision


class Policy(Protocol):
    """Decides the pool sizes periodically.

    Attributes:
        config: targets and limits that the scaler starts with; read once.
        interval_s: seconds between two decisions.
    """

    config: ScalingConfig
    interval_s: float

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        """Makes one decision.

        Args:
            observation: the present observation.
            config: present targets and limits; sizes set by an operator are limits too.
            now: time by the core's clock.
        """
