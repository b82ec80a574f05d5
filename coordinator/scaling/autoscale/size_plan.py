"""Plans the sizes of the pools and the workers that flip; explanation.py puts it in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from baton.coordinator.scaling.autoscale.flips import PlannedFlip, plan_flip
from baton.coordinator.scaling.autoscale.gpu_budget import within_gpu_budget
from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.next_size import (
    NextSize,
    divided,
    next_sizes,
    next_total,
)
from baton.coordinator.scaling.autoscale.situation import Situation
from baton.coordinator.scaling.autoscale.types import WorkerView
from baton.coordinator.state.pools import POOLS, Pool


@dataclass(frozen=True, slots=True)
class SizePlan:
    """Sizes of the pools, in the order of the steps that lead to them.

    Attributes:
        next: size by the needs and limits; of both pools together if they share their work.
        flip: the flip; None: no worker changes pools.
        flipping: workers that flip.
        after_flip: sizes after the flip only.
        wanted: sizes without regard to the GPU budget.
        targets: sizes within the GPU budget.
        free_gpus: GPUs that stay free; None: no limit.
    """

    next: Mapping[Pool, NextSize]
    flip: PlannedFlip | None
    flipping: tuple[WorkerView, ...]
    after_flip: Mapping[Pool, int]
    wanted: Mapping[Pool, int]
    targets: Mapping[Pool, int]
    free_gpus: int | None


def plan_sizes(situation: Situation) -> SizePlan:
    """Plans the next sizes of both pools."""
    if situation.shared:
        total = next_total(situation)
        following = dict.fromkeys(POOLS, total)
        wanted = divided(total.size, situation)
        keep_at_least = sum(wanted.values())
    else:
        following = next_sizes(situation)
        wanted = {pool: following[pool].size for pool in POOLS}
        keep_at_least = sum(one.keep_at_least for one in following.values())
    flip = plan_flip(wanted, situation)
    members, flipping = _after_flip(flip, situation.members)
    after_flip = {pool: situation.members[pool].current for pool in POOLS}
    if flip is not None:
        after_flip[flip.into] += flip.number
        after_flip[flip.giver] -= flip.number
        wanted = _beside_flip(wanted, flip, after_flip, keep_at_least, situation)
    affordable = within_gpu_budget(wanted, members, situation.config)
    return SizePlan(
        next=following,
        flip=flip,
        flipping=flipping,
        after_flip=after_flip,
        wanted=wanted,
        targets=affordable.sizes,
        free_gpus=affordable.free_gpus,
    )


def _beside_flip(
    sizes: Mapping[Pool, int],
    flip: PlannedFlip,
    after_flip: Mapping[Pool, int],
    keep_at_least: int,
    situation: Situation,
) -> dict[Pool, int]:
    """Sizes beside a flip: the giver does not shrink further in this decision.

    Starts that a flipped worker replaces are ended, unless `keep_at_least`, which is for both pools
    together, keeps them.
    """
    into, giver = flip.into, flip.giver
    kept = min(
        after_flip[into],
        keep_at_least - after_flip[giver],
        situation.config.limits(into).ceiling,
    )
    return {giver: after_flip[giver], into: max(sizes[into], kept)}


def _after_flip(
    flip: PlannedFlip | None, members: Mapping[Pool, Members]
) -> tuple[Mapping[Pool, Members], tuple[WorkerView, ...]]:
    """The members after a flip, and the workers that flip; they serve in their new pool."""
    if flip is None:
        return members, ()
    giver, into = members[flip.giver], members[flip.into]
    flipping = tuple(giver.movable.to_remove(flip.number))
    staying = giver.without(frozenset(one.worker_id for one in flipping))
    joined = replace(into, serving=(*into.serving, *flipping))
    return {flip.giver: staying, flip.into: joined}, flipping
