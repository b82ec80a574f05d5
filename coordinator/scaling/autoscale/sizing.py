"""From what is needed to what a pool is to have: limits, window, steps, budget and flips. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.coordinator.scaling.autoscale.types import Observation, Phase, PoolState, WorkerView
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig

POOLS = (Pool.PREFILL, Pool.DECODE)

# A worker that was not needed for so long may change pools.
_LATELY_S = 30.0


def other(pool: Pool) -> Pool:
    return Pool.DECODE if pool is Pool.PREFILL else Pool.PREFILL


@dataclass(frozen=True, slots=True)
class Members:
    """Workers of a pool.

    Attributes:
        stuck: that have been starting for too long.
        num_gpus: of all of them, stuck and draining ones included.
    """

    serving: tuple[WorkerView, ...]
    starting: tuple[WorkerView, ...]
    stuck: tuple[WorkerView, ...]
    num_gpus: int

    @property
    def current(self) -> int:
        """Serving, or on the way there; each counted once."""
        return len(self.serving) + len(self.starting)

    @property
    def cold(self) -> tuple[WorkerView, ...]:
        """On the way there by a cold start."""
        return tuple(one for one in self.starting if not one.flips)

    @classmethod
    def of(cls, observation: Observation, pool: Pool, config: ScalingConfig, now: float) -> Members:
        starting = observation.of(pool, Phase.STARTING)
        stuck = tuple(one for one in starting if now - one.since > config.start_timeout_s)
        usual = config.limits(pool).gpus
        everyone = (one.gpus for one in observation.workers if one.pool is pool)
        return cls(
            serving=tuple(observation.of(pool, Phase.SERVING)),
            starting=tuple(one for one in starting if one not in stuck),
            stuck=stuck,
            num_gpus=sum(usual if gpus is None else gpus for gpus in everyone),
        )


def remembered(
    wanted: Sequence[tuple[float, int]],
    current: int,
    needed: int,
    config: ScalingConfig,
    known_s: float,
    now: float,
) -> tuple[tuple[float, int], ...]:
    """What was wanted within the window, with what is wanted now.

    Where nothing is known of the window, the present size counts as wanted. What a later want
    exceeds never decides again and is left out.
    """
    young = known_s < config.young_s
    since = now - (max(config.window_s, config.young_s) if young else config.window_s)
    found = [one for one in wanted if since <= one[0] <= now]
    if not found:
        found = [(now, current)]
    return (*(one for one in found if one[1] > needed), (now, needed))


def interchangeable(config: ScalingConfig) -> bool:
    """Whether a worker of one pool can do for one of the other."""
    return config.flip and config.prefill.gpus == config.decode.gpus


def lately(
    states: dict[Pool, PoolState],
    config: ScalingConfig,
    known_s: float,
    now: float,
) -> dict[Pool, int]:
    """The most that was wanted of each pool in the last moments; of a young load, ever."""
    young = known_s < config.young_s
    since = now - (config.young_s if young else min(_LATELY_S, config.window_s / 2))
    return {
        pool: max((number for at, number in states[pool].wanted if at >= since), default=0)
        for pool in POOLS
    }


def kept(
    members: dict[Pool, Members],
    needed: dict[Pool, int],
    states: dict[Pool, PoolState],
    wanted: Sequence[tuple[float, int]],
    recent: dict[Pool, int],
    config: ScalingConfig,
    known_s: float,
) -> dict[Pool, int]:
    """What pools do not shrink below: the most that was wanted of each within the window.

    Where workers can change pools, it is enough to keep the most that both together wanted at one
    time: the pools seldom have their peaks together. Workers that have yet to start are kept for as
    long as `recent` has them wanted: what they cost until they serve is not spent yet. A young load
    keeps those that serve, whoever wanted them.
    """
    most, young = {}, known_s < config.young_s
    for pool, one in members.items():
        window, there = (
            max(number for _, number in states[pool].wanted),
            one.current - len(one.cold),
        )
        most[pool] = min(window, max(recent[pool], there))
        if young:
            most[pool] = max(most[pool], there)
    if young or not interchangeable(config):
        return most
    found = {pool: min(most[pool], members[pool].current) for pool in POOLS}
    for _ in range(sum(found.values()) - max(number for _, number in wanted)):
        pool = max(POOLS, key=lambda one: found[one] - needed[one])
        found[pool] -= 1
    return found


def bounded(
    current: int,
    needed: int,
    most: int,
    config: ScalingConfig,
    pool: Pool,
) -> tuple[int, str]:
    """The size that a pool is to have next, but for the budget; and what bounded it, in words.

    Args:
        current: workers.
        needed: by the load now.
        most: as `kept` says.
        config: limits and steps.
        pool: that it is.
    """
    limits = config.limits(pool)
    within = min(limits.ceiling, max(limits.floor, needed))
    if within > current:
        step = max(current + 1, math.floor(current * config.max_up))
        if current < limits.floor:
            step = max(step, limits.floor)
        if step < within:
            return step, f"at most {step} in one step"
        if within < needed:
            return within, f"at most {limits.ceiling} allowed"
        return within, ""
    lowest = min(limits.ceiling, max(limits.floor, most))
    if lowest < current:
        step = current - max(1, math.floor(current * config.max_down))
        if current > limits.ceiling:
            step = min(step, limits.ceiling)
        return max(lowest, step), ""
    if within < current:
        if limits.floor >= current:
            return current, f"at least {limits.floor} allowed"
        return current, f"{most} were needed within {config.window_s:g} s"
    return current, ""


def flips(
    sizes: dict[Pool, int],
    members: dict[Pool, Members],
    needed: dict[Pool, int],
    states: dict[Pool, PoolState],
    recent: dict[Pool, int],
    config: ScalingConfig,
    now: float,
) -> tuple[int, Pool] | None:
    """How many workers change pools, and into which; None for none.

    Only what the short pool lacks and the other has not needed lately. Workers that still start are
    lacking: who flips is there before them. A pool that has just got a worker so does not give one
    back: it must first have been quiet, or would let it go anyway.
    """
    if not interchangeable(config):
        return None
    for pool in POOLS:
        giver = other(pool)
        there = members[pool].current - len(members[pool].cold)
        limits = config.limits(pool)
        short = min(sizes[pool], limits.ceiling, max(limits.floor, needed[pool])) - there
        if short <= 0:
            continue
        # Who leaves all the same had better change pools.
        stay = sizes[giver]
        if now - states[giver].flipped_in_at >= config.flip_quiet_s:
            stay = min(stay, recent[giver])
        keep = max(config.limits(giver).floor, needed[giver], stay)
        # The last one stays, as one that serves must: what it has could not move to another.
        number = min(
            short,
            len(members[giver].serving) - keep,
            sum(one.responds for one in members[giver].serving) - 1,
            len(able(members[giver]).serving),
        )
        if number > 0:
            return number, pool
    return None


def able(members: Members) -> Members:
    """Those of them that can change their role now."""
    serving = tuple(one for one in members.serving if one.responds and not one.stays)
    return replace(members, serving=serving, starting=())


def within_budget(
    sizes: dict[Pool, int], members: dict[Pool, Members], config: ScalingConfig
) -> tuple[dict[Pool, int], dict[Pool, str]]:
    """Cuts growth to the GPUs that are free: those of workers that leave count until they have.

    Who is shortest, relative to its size, grows first.
    """
    found, why = dict(sizes), dict.fromkeys(POOLS, "")
    if config.max_gpus is None:
        return found, why
    free = config.max_gpus - sum(one.num_gpus for one in members.values())
    for pool in POOLS:
        found[pool] = min(sizes[pool], members[pool].current)
    while True:
        growing = [
            pool for pool in POOLS if found[pool] < sizes[pool] and config.limits(pool).gpus <= free
        ]
        if not growing:
            break
        pool = max(growing, key=lambda one: (sizes[one] - found[one]) / max(1, sizes[one]))
        found[pool] += 1
        free -= config.limits(pool).gpus
    for pool in POOLS:
        if found[pool] < sizes[pool]:
            why[pool] = f"{sizes[pool]} wanted, {max(0, free)} of {config.max_gpus} GPUs are free"
    return found, why


def leaving(members: Members, number: int) -> list[WorkerView]:
    """Who goes first: those that do not serve yet, the youngest of them, then the least loaded.

    Of those that do not serve yet first who needs a cold start.
    """
    starting = sorted(members.starting, key=lambda one: (one.flips, -one.since, one.worker_id))
    serving = sorted(members.serving, key=lambda one: (one.num_tokens, -one.since, one.worker_id))
    ours = [one for one in (*starting, *serving) if not one.stays]
    return ours[: max(0, number)]
