"""Plans flips: workers change to the other pool before new workers are started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from baton.coordinator.scaling.autoscale.situation import Situation
from baton.coordinator.state.pools import OTHER_POOL, POOLS, Pool


class PlannedFlip(NamedTuple):
    """Workers that change pools.

    Attributes:
        number: number of workers; at least 1.
        into: pool that the workers join.
    """

    number: int
    into: Pool

    @property
    def giver(self) -> Pool:
        """Pool that the workers leave."""
        return OTHER_POOL[self.into]


def plan_flip(sizes: Mapping[Pool, int], situation: Situation) -> PlannedFlip | None:
    """Plans the flip towards these sizes; None: no worker changes pools."""
    if not situation.can_flip:
        return None
    num_to_get = _num_exchanged if situation.shared else _num_lacking
    for pool in POOLS:
        number = min(num_to_get(pool, sizes, situation), _num_movable(OTHER_POOL[pool], situation))
        if number > 0:
            return PlannedFlip(number, pool)
    return None


def _num_lacking(pool: Pool, sizes: Mapping[Pool, int], situation: Situation) -> int:
    """Number of workers that a pool that is short may get from the other pool.

    The pool gets only workers that it lacks and that the other pool has not needed recently.
    Cold-starting workers count as lacking, because a flip is faster. A pool that has just received
    a worker by a flip gives no worker back within `flip_quiet_s`, except one that it would drain.
    """
    giver, config = OTHER_POOL[pool], situation.config
    limits = config.limits(pool)
    wanted = min(sizes[pool], limits.ceiling, max(limits.floor, situation.needed(pool)))
    short = wanted - situation.members[pool].num_warm
    # Workers that would be drained anyway change pools instead.
    stay = sizes[giver]
    if situation.now - situation.states[giver].flipped_in_at >= config.flip_quiet_s:
        stay = min(stay, situation.recently_needed(giver))
    keep = max(config.limits(giver).floor, situation.needed(giver), stay)
    return min(short, len(situation.members[giver].serving) - keep)


def _num_exchanged(pool: Pool, sizes: Mapping[Pool, int], situation: Situation) -> int:
    """Number of workers that this pool gains and the other loses; the pools share their work.

    A worker of such pools can do the work of both, so a flip would only move its requests. A worker
    therefore flips only if limits or sizes set by hand make one pool grow and the other shrink.
    """
    giver = OTHER_POOL[pool]
    gain = sizes[pool] - situation.members[pool].current
    return min(gain, situation.members[giver].current - sizes[giver])


def _num_movable(giver: Pool, situation: Situation) -> int:
    """Number of workers that a pool can give.

    The last responding worker stays, because its requests could not move to another worker.
    """
    members = situation.members[giver]
    num_responding = sum(one.responds for one in members.serving)
    return min(num_responding - 1, len(members.movable.serving))
