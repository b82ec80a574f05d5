"""Limits the sizes of the pools to the GPUs of `scaling.max_gpus`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import ScalingConfig


class Affordable(NamedTuple):
    """Sizes that the GPUs suffice for.

    Attributes:
        sizes: number of workers, by pool.
        free_gpus: GPUs that no worker of these sizes uses; None: no limit.
    """

    sizes: dict[Pool, int]
    free_gpus: int | None


def within_gpu_budget(
    sizes: Mapping[Pool, int], members: Mapping[Pool, Members], config: ScalingConfig
) -> Affordable:
    """Limits growth to the free GPUs; GPUs of draining workers are in use until these have left.

    The pool with the largest relative shortage grows first.
    """
    if config.max_gpus is None:
        return Affordable(dict(sizes), None)
    free = config.max_gpus - sum(one.num_gpus for one in members.values())
    found = {pool: min(sizes[pool], members[pool].current) for pool in POOLS}
    while True:
        growing = [
            pool for pool in POOLS if found[pool] < sizes[pool] and config.limits(pool).gpus <= free
        ]
        if not growing:
            return Affordable(found, max(0, free))
        pool = max(growing, key=lambda one: (sizes[one] - found[one]) / max(1, sizes[one]))
        found[pool] += 1
        free -= config.limits(pool).gpus
