"""What sizes the pools: the autoscaler, behind the interface that others can stand in for."""

from __future__ import annotations

from typing import Protocol

from baton.coordinator.scaling.autoscale.autoscaler import decide
from baton.coordinator.scaling.autoscale.types import Observation, State
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Decision


class Policy(Protocol):
    """Decides on sizes, again and again.

    Attributes:
        config: targets and limits; whoever carries the decisions out may set another at any time.
        interval_s: between two decisions.
    """

    config: ScalingConfig
    interval_s: float

    def decide(self, observation: Observation, now: float) -> Decision: ...


class Autoscaler:
    """`decide` of autoscaler.py, with the state that it needs."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config, self.interval_s = config, config.interval_s
        self._state = State()

    def decide(self, observation: Observation, now: float) -> Decision:
        decision, self._state = decide(observation, self.config, self._state, now)
        return decision
