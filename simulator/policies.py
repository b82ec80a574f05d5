"""Scaling policies of the simulator: Baton's autoscaler and fixed pool sizes."""

from __future__ import annotations

from baton.coordinator.scaling.autoscale.autoscaler import Autoscaler
from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.policy import Policy
from baton.coordinator.scaling.autoscale.types import Observation
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Action, Decision, PoolDecision

__all__ = ["Baton", "Policy", "Static", "decision"]

Baton = Autoscaler


class Static:
    """A policy that never changes the pool sizes."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config, self.interval_s = config, config.interval_s

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        sizes = {pool: Members.of(observation, pool, config, now).current for pool in Pool}
        return decision(sizes, sizes, "static", ())


def decision(
    current: dict[Pool, int], target: dict[Pool, int], reason: str, actions: tuple[Action, ...]
) -> Decision:
    """Returns a decision with the same one-line reason for both pools."""
    prefill, decode = (
        PoolDecision(pool, current[pool], target[pool], target[pool], reason)
        for pool in (Pool.PREFILL, Pool.DECODE)
    )
    return Decision(prefill, decode, actions)
