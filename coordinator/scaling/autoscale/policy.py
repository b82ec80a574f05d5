"""Interface of scaling policies, and the autoscaler as its default implementation."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.scaling.autoscale.autoscaler import decide
from baton.coordinator.scaling.autoscale.types import Observation, State
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


class Autoscaler:
    """Calls `decide` of autoscaler.py and keeps the state between decisions."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config, self.interval_s = config, config.interval_s
        self._state = State()

    def decide(self, observation: Observation, now: float) -> Decision:
        decision, self._state = decide(observation, self.config, self._state, now)
        return decision
