"""Computes the target sizes of the pools from the needed sizes.

The functions apply the limits, the window in which a pool does not shrink, the step size, the GPU
budget and flips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.coordinator.scaling.autoscale.types import Observation, Phase, PoolState, WorkerView
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig

POOLS = (Pool.PREFILL, Pool.DECODE)

# A worker that was not needed for this long may change pools.
_RECENT_S = 30.0


def other_pool(pool: Pool) -> Pool:
    return Pool.DECODE if pool is Pool.PREFILL else Pool.PREFILL


@dataclass(frozen=True, slots=True)
class Members:
    """Workers of a pool.

    Attributes:
        serving: serving workers.
        starting: workers that start or flip into the pool.
        stuck: workers whose cold start has taken longer than the start timeout.
        num_gpus: GPUs of all workers, including stuck and draining workers.
    """

    serving: tuple[WorkerView, ...]
    starting: tuple[WorkerView, ...]
    stuck: tuple[WorkerView, ...]
    num_gpus: int

    @property
    def current(self) -> int:
        """Number of serving and starting workers."""
        return len(self.serving) + len(self.starting)

    @property
    def cold(self) -> tuple[WorkerView, ...]:
        """Workers that start with a cold start, in contrast to flips."""
        return tuple(one for one in self.starting if not one.flips)

    @classmethod
    def of(cls, observation: Observation, pool: Pool, config: ScalingConfig, now: float) -> Members:
        starting = observation.of(pool, Phase.STARTING)
        # A flip may take as long as the worker's requests; it has a limit of its own (drain_s).
        stuck = tuple(
            one for one in starting if not one.flips and now - one.since > config.start_timeout_s
        )
        usual = config.limits(pool).gpus
        everyone = (one.gpus for one in observation.workers if one.pool is pool)
        return cls(
            serving=tuple(observation.of(pool, Phase.SERVING)),
            starting=tuple(one for one in starting if one not in stuck),
            stuck=stuck,
            num_gpus=sum(usual if gpus is None else gpus for gpus in everyone),
        )


def add_need(
    wanted: Sequence[tuple[float, int]],
    current: int,
    needed: int,
    config: ScalingConfig,
    known_s: float,
    now: float,
    *,
    num_kept: int = 0,
) -> tuple[tuple[float, int], ...]:
    """Adds the present need to the needs within the window; a monotonic queue for their maximum.

    Without earlier entries the present size counts as needed. Entries that are not larger than the
    new need are dropped, because they can no longer be the maximum.

    Args:
        wanted: pairs (time, needed workers) within the window, oldest first.
        current: present number of workers.
        needed: number of workers that the present load needs.
        config: lengths of the windows.
        known_s: how long the load has been known.
        now: time by the core's clock.
        num_kept: earlier needs of at most this many workers do not count, except while the load is
            known for a short time.
    """
    young = known_s < config.young_s
    since = now - (max(config.window_s, config.young_s) if young else config.window_s)
    found = [one for one in wanted if since <= one[0] <= now]
    if not found:
        found = [(now, current)]
    least = needed if young else max(needed, num_kept)
    return (*(one for one in found if one[1] > least), (now, needed))


def share_work(observation: Observation, config: ScalingConfig) -> bool:
    """Whether any worker can do the work of both pools, so that only their sum matters."""
    return observation.shared and config.prefill.gpus == config.decode.gpus


def can_flip(config: ScalingConfig) -> bool:
    """Whether workers can change pools: flips are enabled and the pools use equal GPU counts."""
    return config.flip and config.prefill.gpus == config.decode.gpus


def recent_needs(
    states: dict[Pool, PoolState],
    config: ScalingConfig,
    known_s: float,
    now: float,
) -> dict[Pool, int]:
    """Maximum need of each pool in the last _RECENT_S seconds; see `_recent_need`."""
    return {pool: _recent_need(states[pool].wanted, config, known_s, now) for pool in POOLS}


def _recent_need(
    wanted: Sequence[tuple[float, int]], config: ScalingConfig, known_s: float, now: float
) -> int:
    """Maximum need in the last _RECENT_S seconds.

    While the load has been known for less than `config.young_s`, all earlier needs count.
    """
    young = known_s < config.young_s
    since = now - (config.young_s if young else min(_RECENT_S, config.window_s / 2))
    return max((number for at, number in wanted if at >= since), default=0)


def _shrink_limit(
    wanted: Sequence[tuple[float, int]], there: int, recent: int, *, young: bool
) -> int:
    """Lower limit for shrinking: the maximum need within the window.

    Cold-starting workers are kept only while `recent` needs them, since most of their cost is not
    spent yet. For a young load all serving workers are kept.

    Args:
        wanted: needs within the window.
        there: number of workers without those that start cold.
        recent: maximum of the recent needs, from `_recent_need`.
        young: whether the load has been known for a short time only.
    """
    most = min(max(number for _, number in wanted), max(recent, there))
    return max(most, there) if young else most


def shrink_limits(
    members: dict[Pool, Members],
    needed: dict[Pool, int],
    states: dict[Pool, PoolState],
    wanted: Sequence[tuple[float, int]],
    recent: dict[Pool, int],
    config: ScalingConfig,
    known_s: float,
) -> dict[Pool, int]:
    """Lower limits for shrinking: the maximum need of each pool within the window.

    If workers can change pools, it is enough to keep the maximum of the sum of both needs, because
    the pools seldom peak together.
    """
    young = known_s < config.young_s
    most = {
        pool: _shrink_limit(
            states[pool].wanted, one.current - len(one.cold), recent[pool], young=young
        )
        for pool, one in members.items()
    }
    if young or not can_flip(config):
        return most
    found = {pool: min(most[pool], members[pool].current) for pool in POOLS}
    for _ in range(sum(found.values()) - max(number for _, number in wanted)):
        pool = max(POOLS, key=lambda one: found[one] - needed[one])
        found[pool] -= 1
    return found


def last_needed_s(wanted: Sequence[tuple[float, int]], number: int, now: float) -> float | None:
    """Seconds since this many workers were needed last; None: not within the window."""
    return min((now - at for at, needed in wanted if needed >= number), default=None)


def next_size(
    current: int,
    needed: int,
    most: int,
    needed_ago_s: float | None,
    config: ScalingConfig,
    limits: PoolLimits,
) -> tuple[int, str]:
    """Next size of a pool without regard to the GPU budget, and the limit that applied, if any.

    Args:
        current: present number of workers.
        needed: number of workers that the present load needs.
        most: lower limit for shrinking, from `shrink_limits`.
        needed_ago_s: how long ago that many were needed; None: unknown.
        config: window and step sizes.
        limits: limits of the pool.
    """
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
        if needed_ago_s is None:
            return current, f"{most} were needed within {config.window_s:g} s"
        return (
            current,
            f"{most} were needed {needed_ago_s:.0f} s ago (kept for {config.window_s:g} s)",
        )
    return current, ""


def joint_sizes(
    members: dict[Pool, Members],
    needed: dict[Pool, int],
    wanted: Sequence[tuple[float, int]],
    config: ScalingConfig,
    known_s: float,
    now: float,
) -> tuple[dict[Pool, int], str]:
    """Next sizes of pools that share their work: only the sum of the sizes matters.

    Args:
        members: the workers.
        needed: number of workers that the load of each pool needs.
        wanted: sums of both needs within the window.
        config: limits, window and step sizes.
        known_s: how long the load has been known.
        now: time by the core's clock.

    Returns:
        The sizes, without regard to the GPU budget, and the limit that applied, if any.
    """
    limits = [config.limits(pool) for pool in POOLS]
    current = sum(one.current for one in members.values())
    most = _shrink_limit(
        wanted,
        current - sum(len(one.cold) for one in members.values()),
        _recent_need(wanted, config, known_s, now),
        young=known_s < config.young_s,
    )
    size, why = next_size(
        current,
        sum(needed.values()),
        most,
        last_needed_s(wanted, most, now),
        config,
        PoolLimits(sum(one.floor for one in limits), sum(one.ceiling for one in limits)),
    )
    sizes = {
        pool: min(
            max(members[pool].current, config.limits(pool).floor), config.limits(pool).ceiling
        )
        for pool in POOLS
    }
    while sum(sizes.values()) != size:
        step = 1 if sum(sizes.values()) < size else -1
        possible = [
            pool
            for pool in POOLS
            if config.limits(pool).floor <= sizes[pool] + step <= config.limits(pool).ceiling
        ]
        if not possible:
            break
        sizes[max(possible, key=lambda pool: step * (needed[pool] - sizes[pool]))] += step
    return sizes, why


def plan_flip(
    sizes: dict[Pool, int],
    members: dict[Pool, Members],
    needed: dict[Pool, int],
    states: dict[Pool, PoolState],
    recent: dict[Pool, int],
    config: ScalingConfig,
    now: float,
) -> tuple[int, Pool] | None:
    """Plans a flip: the number of workers that change pools, and the pool they join; None: no flip.

    The pool that is short gets only workers that it lacks and that the other pool has not needed
    recently. Cold-starting workers count as lacking, because a flip is faster. A pool that has just
    received a worker by a flip gives no worker back within `flip_quiet_s`, except one that it would
    drain.
    """
    if not can_flip(config):
        return None
    for pool in POOLS:
        giver = other_pool(pool)
        there = members[pool].current - len(members[pool].cold)
        limits = config.limits(pool)
        short = min(sizes[pool], limits.ceiling, max(limits.floor, needed[pool])) - there
        if short <= 0:
            continue
        # Workers that would be drained anyway change pools instead.
        stay = sizes[giver]
        if now - states[giver].flipped_in_at >= config.flip_quiet_s:
            stay = min(stay, recent[giver])
        keep = max(config.limits(giver).floor, needed[giver], stay)
        # The last responding worker stays, because its requests could not move to another worker.
        number = min(
            short,
            len(members[giver].serving) - keep,
            sum(one.responds for one in members[giver].serving) - 1,
            len(movable(members[giver]).serving),
        )
        if number > 0:
            return number, pool
    return None


def plan_exchange(
    sizes: dict[Pool, int], members: dict[Pool, Members], config: ScalingConfig
) -> tuple[int, Pool] | None:
    """Plans a flip like `plan_flip`, for pools that share their work.

    A worker of such pools can do the work of both, so a flip would only move its requests. A worker
    therefore flips only if limits or sizes set by hand make one pool grow and the other shrink.
    """
    if not can_flip(config):
        return None
    for pool in POOLS:
        giver = members[other_pool(pool)]
        number = min(
            sizes[pool] - members[pool].current,
            giver.current - sizes[other_pool(pool)],
            sum(one.responds for one in giver.serving) - 1,
            len(movable(giver).serving),
        )
        if number > 0:
            return number, pool
    return None


def movable(members: Members) -> Members:
    """Members that may be moved to the other pool now."""
    serving = tuple(one for one in members.serving if one.responds and not one.stays)
    return replace(members, serving=serving, starting=())


def within_gpu_budget(
    sizes: dict[Pool, int], members: dict[Pool, Members], config: ScalingConfig
) -> tuple[dict[Pool, int], dict[Pool, str]]:
    """Limits growth to the free GPUs; GPUs of draining workers are in use until these have left.

    The pool with the largest relative shortage grows first.
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


def to_remove(members: Members, number: int) -> list[WorkerView]:
    """Workers to remove: first starting workers, then the serving workers with the least load.

    Among starting workers, cold starts come before flips, and the youngest comes first.
    """
    starting = sorted(members.starting, key=lambda one: (one.flips, -one.since, one.worker_id))
    serving = sorted(members.serving, key=lambda one: (one.num_tokens, -one.since, one.worker_id))
    ours = [one for one in (*starting, *serving) if not one.stays]
    return ours[: max(0, number)]
