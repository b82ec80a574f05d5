"""Decision for a load that is not known: the pools keep their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from baton.coordinator.scaling.autoscale.explanation import drains_of_stuck
from baton.coordinator.scaling.autoscale.gpu_budget import within_gpu_budget
from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.scaling_decision import Action, Decision, PoolDecision, SetSize


def frozen(
    members: Mapping[Pool, Members], config: ScalingConfig, problem: str, now: float
) -> Decision:
    """Keeps the pools' sizes, but grows pools to their minimum and ends stuck starts.

    Args:
        members: the workers, by pool.
        config: limits of the pools.
        problem: why the load is not known.
        now: time by the core's clock.
    """
    decided = {}
    for pool in POOLS:
        current, floor = members[pool].current, config.limits(pool).floor
        reason = f"{problem}: stays as it is"
        if current < floor:
            reason = f"{problem}: at least {floor} all the same"
        decided[pool] = PoolDecision(pool, current, current, max(current, floor), reason)
    targets = within_gpu_budget(
        {pool: one.target for pool, one in decided.items()}, members, config
    ).sizes
    actions: list[Action] = []
    for pool in POOLS:
        actions += drains_of_stuck(members[pool], now)
        if targets[pool] > members[pool].current:
            actions.append(SetSize(pool, targets[pool]))
        lacking = decided[pool].target - targets[pool]
        decided[pool] = replace(decided[pool], target=targets[pool], lacking_gpus=lacking)
    return Decision(decided[Pool.PREFILL], decided[Pool.DECODE], tuple(actions))
