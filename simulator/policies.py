"""What may size the pools: Baton's autoscaler, and what it is compared with."""

from __future__ import annotations

from baton.coordinator.scaling.autoscale.policy import Autoscaler, Policy
from baton.coordinator.scaling.autoscale.sizing import Members
from baton.coordinator.scaling.autoscale.types import Observation
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Action, Decision, PoolDecision

__all__ = ["Baton", "Policy", "Static", "decision"]

Baton = Autoscaler


class Static:
    """Pools stay as they are."""

    def __init__(self, config: ScalingConfig) -> None:
        self.config, self.interval_s = config, config.interval_s

    def decide(self, observation: Observation, now: float) -> Decision:
        sizes = {pool: Members.of(observation, pool, self.config, now).current for pool in Pool}
        return decision(sizes, sizes, "static", ())


def decision(
    current: dict[Pool, int], target: dict[Pool, int], reason: str, actions: tuple[Action, ...]
) -> Decision:
    """Of a policy that explains itself in one line."""
    prefill, decode = (
        PoolDecision(pool, current[pool], target[pool], target[pool], reason)
        for pool in (Pool.PREFILL, Pool.DECODE)
    )
    return Decision(prefill, decode, actions)
