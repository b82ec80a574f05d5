"""Computes the next sizes of the pools from the needed sizes, without regard to the GPU budget.

The limits of the pool, the largest step and the window in which a pool does not shrink apply.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from typing import NamedTuple

from baton.coordinator.scaling.autoscale.need_history import largest_need
from baton.coordinator.scaling.autoscale.situation import Situation
from baton.coordinator.scaling.autoscale.types import NeedHistory
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig


class Limit(Enum):
    """Why a size differs from the needed size.

    Attributes:
        STEP: a pool grows by one step in a decision.
        CEILING: the pool may not be larger.
        WINDOW: more workers were needed within the window.
    """

    STEP = auto()
    CEILING = auto()
    WINDOW = auto()


class NextSize(NamedTuple):
    """Next size of a pool, or of both pools together if they share their work.

    Attributes:
        size: number of workers.
        limit: the limit that applied; None: the size is the needed size, or the pool shrinks.
        keep_at_least: size below which the pool does not shrink because of needs of the past.
    """

    size: int
    limit: Limit | None
    keep_at_least: int


def next_sizes(situation: Situation) -> dict[Pool, NextSize]:
    """Next sizes of pools that do different work."""
    keep = _keep_at_least_by_pool(situation)
    return {
        pool: _next_size(
            situation.members[pool].current,
            situation.needed(pool),
            keep[pool],
            situation.config,
            situation.limits(pool),
        )
        for pool in POOLS
    }


def next_total(situation: Situation) -> NextSize:
    """Next size of both pools together, which share their work."""
    limits = [situation.limits(pool) for pool in POOLS]
    keep_at_least = _keep_at_least(
        situation,
        situation.total_history,
        sum(one.num_warm for one in situation.members.values()),
    )
    return _next_size(
        situation.current,
        situation.total_needed,
        keep_at_least,
        situation.config,
        PoolLimits(sum(one.floor for one in limits), sum(one.ceiling for one in limits)),
    )


def divided(total: int, situation: Situation) -> dict[Pool, int]:
    """Divides a size of both pools between them, within their limits.

    The pool that lacks most workers grows first, and the pool with most spare workers shrinks
    first.
    """
    limits = {pool: situation.limits(pool) for pool in POOLS}
    sizes = {
        pool: min(max(situation.members[pool].current, one.floor), one.ceiling)
        for pool, one in limits.items()
    }
    while sum(sizes.values()) != total:
        step = 1 if sum(sizes.values()) < total else -1
        possible = [
            pool for pool, one in limits.items() if one.floor <= sizes[pool] + step <= one.ceiling
        ]
        if not possible:
            break
        sizes[max(possible, key=lambda pool: step * (situation.needed(pool) - sizes[pool]))] += step
    return sizes


def _keep_at_least_by_pool(situation: Situation) -> dict[Pool, int]:
    """Sizes below which the pools do not shrink: the maximum need of each within the window.

    If workers can change pools, it is enough to keep the maximum of the sum of both needs, because
    the pools seldom peak together.
    """
    keep = {
        pool: _keep_at_least(situation, situation.states[pool].need_history, one.num_warm)
        for pool, one in situation.members.items()
    }
    if situation.is_young or not situation.can_flip:
        return keep
    keep = {pool: min(keep[pool], situation.members[pool].current) for pool in POOLS}
    for _ in range(sum(keep.values()) - largest_need(situation.total_history)):
        pool = max(POOLS, key=lambda one: keep[one] - situation.needed(one))
        keep[pool] -= 1
    return keep


def _keep_at_least(situation: Situation, history: NeedHistory, num_warm: int) -> int:
    """Size below which a pool does not shrink: the maximum need within the window.

    Cold-starting workers are kept only while the recent needs include them, since most of their
    cost is not spent yet. For a young load all serving workers are kept.

    Args:
        situation: the situation.
        history: needs within the window.
        num_warm: number of workers without those that start cold.
    """
    keep = min(largest_need(history), max(situation.recent_need(history), num_warm))
    return max(keep, num_warm) if situation.is_young else keep


def _next_size(
    current: int, needed: int, keep_at_least: int, config: ScalingConfig, limits: PoolLimits
) -> NextSize:
    """Next size of a pool.

    Args:
        current: present number of workers.
        needed: number of workers that the present load needs.
        keep_at_least: size below which the pool does not shrink.
        config: step sizes.
        limits: limits of the pool.
    """
    within = min(limits.ceiling, max(limits.floor, needed))
    if within > current:
        step = max(current + 1, math.floor(current * config.max_up))
        if current < limits.floor:
            step = max(step, limits.floor)
        if step < within:
            return NextSize(step, Limit.STEP, keep_at_least)
        return NextSize(within, Limit.CEILING if within < needed else None, keep_at_least)
    lowest = min(limits.ceiling, max(limits.floor, keep_at_least))
    if lowest < current:
        step = current - max(1, math.floor(current * config.max_down))
        if current > limits.ceiling:
            step = min(step, limits.ceiling)
        return NextSize(max(lowest, step), None, keep_at_least)
    return NextSize(current, Limit.WINDOW if within < current else None, keep_at_least)
