"""How many workers and GPUs a canary fleet needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.fleets import Fleet, Fleets
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import Worker
from baton.v1 import cluster_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING


def serving(workers: Iterable[Worker]) -> Counter[Pool]:
    """Counts the workers that serve, by pool."""
    return Counter(POOL_OF[one.role] for one in workers if one.serving and one.role in POOL_OF)


def interchangeable(fleets: Fleets) -> tuple[tuple[Pool, ...], ...]:
    """Returns the groups of pools whose workers can do each other's work.

    An elastic cell has one group of both pools, any other cell one group per pool. A canary needs a
    worker of each group, and its size is compared by group.
    """
    return (tuple(Pool),) if fleets.elastic else tuple((pool,) for pool in Pool)


def canary_sizes(
    fleets: Fleets, attached: Iterable[Worker], sizes: Mapping[Pool, int]
) -> dict[Pool, int]:
    """Returns the number of workers by pool up to which the coordinator starts canary workers.

    Args:
        fleets: All fleets.
        attached: The canary's attached workers.
        sizes: Numbers of workers that the operator gave, attached ones included. For a pool
            without a number: 1, or 0 if an attached worker can do the pool's work, so that the
            coordinator starts none.
    """
    pools = {POOL_OF.get(one.role) for one in attached}
    return {
        pool: sizes.get(pool, 1 if pools.isdisjoint(group) else 0)
        for group in interchangeable(fleets)
        for pool in group
    }


def promoted_sizes(fleets: Fleets, scaler: Scaler) -> dict[Pool, int]:
    """Returns the number of workers by pool that a canary needs to replace the stable fleet.

    It is the stable fleet's number, and at least one worker of each group of interchangeable pools.
    """
    if scaler.active:
        sizes = {pool: scaler.desired(pool) for pool in Pool}
    else:
        counts = serving(fleets.stable.workers)
        sizes = {pool: counts[pool] for pool in Pool}
    return sizes if fleets.elastic else {pool: max(1, size) for pool, size in sizes.items()}


def promotion_sizes(
    fleets: Fleets, scaler: Scaler, attached: Iterable[Worker], sizes: Mapping[Pool, int]
) -> dict[Pool, int]:
    """Returns the number of workers by pool to which a canary grows before it is promoted.

    Each group of interchangeable pools gets at least as many workers as `promoted_sizes` says.
    Workers that a canary has or starts count for any pool of their group.

    Args:
        fleets: All fleets.
        scaler: Starts workers if it is active.
        attached: The canary's attached workers.
        sizes: Numbers of workers up to which the coordinator starts canary workers now.
    """
    wanted, there = promoted_sizes(fleets, scaler), _staying(attached)
    own = {pool: max(sizes[pool], there[pool]) for pool in Pool}
    found = dict.fromkeys(Pool, 0)
    for group in interchangeable(fleets):
        missing = sum(wanted[pool] for pool in group)
        kept = {pool: min(own[pool], wanted[pool]) for pool in group}
        # First the workers that the stable fleet has in the same pool, then the canary's other
        # workers, and new workers last.
        for most in (kept, own, wanted):
            for pool in group:
                more = min(missing, max(0, most[pool] - found[pool]))
                found[pool] += more
                missing -= more
    return {pool: max(sizes[pool], found[pool]) for pool in Pool}


def has_promoted_sizes(
    fleets: Fleets, scaler: Scaler, canary: Fleet, sizes: Mapping[Pool, int]
) -> bool:
    """Whether a canary has enough serving workers to replace the stable fleet.

    Args:
        fleets: All fleets.
        scaler: Starts workers if it is active. Then `sizes` are enough: the stable pools may have
            grown since, and scaling.max_gpus may have no room for as many canary workers.
        canary: The canary.
        sizes: Numbers of workers up to which the coordinator starts canary workers.
    """
    counts, wanted = serving(canary.workers), promoted_sizes(fleets, scaler)
    for group in interchangeable(fleets):
        needed = sum(wanted[pool] for pool in group)
        if scaler.active:
            needed = min(needed, sum(sizes[pool] for pool in group))
        if sum(counts[pool] for pool in group) < max(1, needed):
            return False
    return True


def num_lacking(scaler: Scaler, canary: Fleet, sizes: Mapping[Pool, int]) -> dict[Pool, int]:
    """Returns the number of workers by pool that a canary neither has nor starts."""
    there, launches = _staying(canary.workers), scaler.launches
    return {
        pool: max(0, sizes[pool] - there[pool] - launches.num_starting(pool, canary))
        for pool in Pool
    }


def num_without_gpus(scaler: Scaler, canary: Fleet, sizes: Mapping[Pool, int]) -> dict[Pool, int]:
    """Returns the number of workers by pool that cannot be started for lack of GPUs."""
    return {
        pool: int(max(0, number - scaler.num_startable(pool, canary.revision)))
        for pool, number in num_lacking(scaler, canary, sizes).items()
    }


def canary_gpus(
    scaler: Scaler, attached: Iterable[Worker], revision: Revision, sizes: Mapping[Pool, int]
) -> int:
    """Returns the GPUs of a canary's workers and of those that it still needs for these sizes."""
    there = [one for one in attached if one.state != _DRAINING]
    counts = _staying(there)
    missing = {pool: max(0, number - counts[pool]) for pool, number in sizes.items()}
    return scaler.gpus_of(there) + scaler.gpus(missing, revision)


def _staying(workers: Iterable[Worker]) -> Counter[Pool]:
    """Counts the workers that do not drain, by pool."""
    return Counter(
        POOL_OF[one.role] for one in workers if one.role in POOL_OF and one.state != _DRAINING
    )
