"""Why a rollout cannot be started, changed or promoted: errors that name the field and value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.fleets import Fleet, Fleets
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from baton.runtime.names import REVISION_NAMES, is_revision
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


def has_promoted_sizes(fleets: Fleets, scaler: Scaler, canary: Fleet) -> bool:
    """Whether a canary has enough serving workers to replace the stable fleet."""
    counts, wanted = serving(canary.workers), promoted_sizes(fleets, scaler)
    return all(
        sum(counts[pool] for pool in group) >= max(1, sum(wanted[pool] for pool in group))
        for group in interchangeable(fleets)
    )


def canary_gpus(
    scaler: Scaler, attached: Iterable[Worker], revision: Revision, sizes: Mapping[Pool, int]
) -> int:
    """Returns the GPUs of a canary's workers and of those that it still needs for these sizes."""
    there = [one for one in attached if one.state != _DRAINING]
    counts = Counter(POOL_OF.get(one.role) for one in there)
    lacking = {pool: max(0, number - counts[pool]) for pool, number in sizes.items()}
    return scaler.gpus_of(there) + scaler.gpus(lacking, revision)


def none_runs() -> BatonError:
    """The error of a call that needs a running rollout."""
    return FailedPrecondition("no rollout runs")


def share_error(share: float) -> BatonError | None:
    """Returns why this share is invalid; None if it is valid."""
    return None if 0 <= share <= 1 else InvalidArgument("share", share, "0 to 1")


def start_error(
    workers: WorkerRegistry,
    scaler: Scaler,
    running: Fleet | None,
    retiring: Collection[Fleet],
    revision: Revision,
    sizes: Mapping[Pool, int],
) -> BatonError | None:
    """Returns why this rollout cannot be started; None if it can.

    Args:
        workers: All attached workers.
        scaler: Starts workers if it is active.
        running: The canary of the rollout that runs, if any.
        retiring: Fleets that leave.
        revision: Launch configuration of the canary's workers.
        sizes: Numbers of workers that the operator gave, as for `canary_sizes`.
    """
    name, fleet = revision.name, workers.fleets.find(revision.name)
    if not is_revision(name):
        return InvalidArgument("revision", name, REVISION_NAMES)
    if fleet is workers.fleets.stable:
        allowed = "must differ from the name of the stable revision"
        return InvalidArgument("revision", name, allowed)
    if running is not None:
        return FailedPrecondition(
            f"revision is {name!r}; a rollout of {running.name!r} runs: promote or abort it first"
        )
    if fleet is not None and fleet in retiring:
        return FailedPrecondition(
            f"revision is {name!r}, and earlier workers of this revision have not left yet: "
            "wait until they have left, or use another name"
        )
    attached = list(fleet.workers) if fleet is not None else []
    wanted = canary_sizes(workers.fleets, attached, sizes)
    return _workers_error(workers.fleets, scaler, attached, revision, sizes) or _gpus_error(
        workers, scaler, attached, revision, wanted
    )


def promote_error(workers: WorkerRegistry, scaler: Scaler, canary: Fleet) -> BatonError | None:
    """Returns why this canary cannot be promoted; None if it can."""
    fleets, launches = workers.fleets, scaler.launches
    name, stable = canary.name, fleets.stable
    counts, sizes = serving(canary.workers), promoted_sizes(fleets, scaler)
    for group in interchangeable(fleets):
        num_serving, kind = sum(counts[pool] for pool in group), _kind(group)
        if not num_serving:
            problems = (
                launches.problem(pool, canary) or launches.waiting(pool, canary) for pool in group
            )
            problem = "; ".join(filter(None, problems))
            return FailedPrecondition(
                f"revision {name!r} has no {kind} that serves" + (f": {problem}" if problem else "")
            )
        wanted = sum(sizes[pool] for pool in group)
        if not scaler.active and num_serving < wanted:
            return FailedPrecondition(
                f"revision {name!r} has {num_serving} serving {kind}s and needs "
                f"{wanted}, as many as revision {stable.name!r}; this coordinator starts none: "
                f"start {wanted - num_serving} more with --revision {name}, or drain some of "
                f"revision {stable.name!r}"
            )
    return _gpus_error(workers, scaler, list(canary.workers), canary.revision, sizes)


def _kind(group: Collection[Pool]) -> str:
    """Returns the singular noun for the workers of interchangeable pools."""
    return "worker" if len(group) > 1 else " ".join([*(pool.value for pool in group), "worker"])


def _workers_error(
    fleets: Fleets,
    scaler: Scaler,
    attached: Iterable[Worker],
    revision: Revision,
    sizes: Mapping[Pool, int],
) -> BatonError | None:
    """Returns why these numbers of workers cannot be started; None if they can."""
    name, pools = revision.name, {POOL_OF.get(one.role) for one in attached}
    lacking = [group for group in interchangeable(fleets) if pools.isdisjoint(group)]
    if scaler.active:
        for pool in Pool:
            most = scaler.limits(pool)[1]
            if sizes.get(pool, 0) > most:
                allowed = f"at most {most}, which is scaling.{pool.value}.max_workers"
                return InvalidArgument(pool.value, sizes[pool], allowed)
        wanted = canary_sizes(fleets, attached, sizes)
        for group in lacking:
            if not any(wanted[pool] for pool in group):
                field = " + ".join(pool.value for pool in group)
                allowed = f"at least 1: no {_kind(group)} of revision {name!r} is attached"
                return InvalidArgument(field, 0, allowed)
        return None
    if revision.model or revision.engine_args or any(sizes.values()):
        return FailedPrecondition(
            "this coordinator starts no workers, so model, engine_args, prefill and decode must be "
            f"left out: start them with `baton worker --revision {name}`"
        )
    if not lacking:
        return None
    kinds = " and no ".join(pool.value for group in lacking for pool in group if len(group) == 1)
    return FailedPrecondition(
        f"no {kinds + ' ' if kinds else ''}worker of revision {name!r} is attached, and this "
        f"coordinator starts none: start them with `baton worker --revision {name}`"
    )


def _gpus_error(
    workers: WorkerRegistry,
    scaler: Scaler,
    attached: Collection[Worker],
    revision: Revision,
    wanted: Mapping[Pool, int],
) -> BatonError | None:
    """Returns why scaling.max_gpus has no room for a canary of these sizes; None if it has.

    Attached workers have their GPUs already, so only further ones are refused.
    """
    most, needed = scaler.max_gpus, canary_gpus(scaler, attached, revision, wanted)
    if needed == canary_gpus(scaler, attached, revision, {}):
        return None
    used = scaler.gpus({pool: scaler.desired(pool) for pool in Pool})
    current = (workers.fleets.stable.name, revision.name)
    left = scaler.gpus_of(one for one in workers if one.fleet.name not in current)
    if not scaler.active or most is None or needed + used + left <= most:
        return None
    return FailedPrecondition(
        f"scaling.max_gpus is {most}; {used} are the stable revision's, "
        + (f"{left} belong to revisions that leave, " if left else "")
        + f"and the canary needs {needed}: both revisions run side by side"
    )
