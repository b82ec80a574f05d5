"""Why a rollout cannot be started, changed or promoted: errors that name the field and value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.fleets import Fleet
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


def to_start(attached: Iterable[Worker], pool: Pool, sizes: Mapping[Pool, int]) -> int:
    """Returns how many workers a canary needs in a pool.

    Args:
        attached: The canary's attached workers.
        pool: The pool.
        sizes: Numbers that the operator gave. The default is 1, or 0 if the pool has a worker.
    """
    has_worker = any(POOL_OF.get(one.role) is pool for one in attached)
    return sizes.get(pool, 0 if has_worker else 1)


def promoted_size(stable: Fleet, scaler: Scaler, pool: Pool) -> int:
    """Returns how many workers a canary needs to replace the stable fleet."""
    there = scaler.desired(pool) if scaler.active else serving(stable.workers)[pool]
    return max(1, there)


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
        sizes: Numbers of workers that the operator gave, as for `to_start`.
    """
    name, fleet = revision.name, workers.fleets.find(revision.name)
    if not is_revision(name):
        return InvalidArgument("revision", name, REVISION_NAMES)
    if fleet is workers.fleets.stable:
        allowed = "must differ from the stable revision's name, which its workers report too"
        return InvalidArgument("revision", name, allowed)
    if running is not None:
        return FailedPrecondition(
            f"revision is {name!r}; a rollout of {running.name!r} runs: promote or abort it first"
        )
    if fleet is not None and fleet in retiring:
        return FailedPrecondition(
            f"revision is {name!r}, whose workers have not left yet: wait until they have, or use "
            "another name"
        )
    attached = list(fleet.workers) if fleet is not None else []
    wanted = {pool: to_start(attached, pool, sizes) for pool in Pool}
    return _workers_error(scaler, attached, revision, sizes) or _gpus_error(
        workers, scaler, attached, revision, wanted
    )


def promote_error(workers: WorkerRegistry, scaler: Scaler, canary: Fleet) -> BatonError | None:
    """Returns why this canary cannot be promoted; None if it can."""
    name, stable = canary.name, workers.fleets.stable
    counts = serving(canary.workers)
    for pool in Pool:
        if not counts[pool]:
            launches = scaler.launches
            problem = launches.problem(pool, canary) or launches.waiting(pool, canary)
            return FailedPrecondition(
                f"revision {name!r} has no {pool.value} worker that serves"
                + (f": {problem}" if problem else "")
            )
        wanted = promoted_size(stable, scaler, pool)
        if not scaler.active and counts[pool] < wanted:
            return FailedPrecondition(
                f"revision {name!r} has {counts[pool]} serving {pool.value} workers and needs "
                f"{wanted}, as many as revision {stable.name!r}; this coordinator starts none: "
                f"start {wanted - counts[pool]} more with --revision {name}, or drain some of "
                f"revision {stable.name!r}"
            )
    sizes = {pool: promoted_size(stable, scaler, pool) for pool in Pool}
    return _gpus_error(workers, scaler, list(canary.workers), canary.revision, sizes)


def _workers_error(
    scaler: Scaler, attached: Iterable[Worker], revision: Revision, sizes: Mapping[Pool, int]
) -> BatonError | None:
    """Returns why these numbers of workers cannot be started; None if they can."""
    name, pools = revision.name, {POOL_OF.get(one.role) for one in attached}
    if scaler.active:
        for pool in Pool:
            most = scaler.limits(pool)[1]
            if sizes.get(pool, 0) > most:
                allowed = f"at most {most}, which is scaling.{pool.value}.max_workers"
                return InvalidArgument(pool.value, sizes[pool], allowed)
            if pool not in pools and not to_start(attached, pool, sizes):
                allowed = f"at least 1: no {pool.value} worker of revision {name!r} is attached"
                return InvalidArgument(pool.value, 0, allowed)
        return None
    if revision.model or revision.engine_args or any(sizes.values()):
        return FailedPrecondition(
            "this coordinator starts no workers, so model, engine_args, prefill and decode must be "
            f"left out: start them with `baton worker --revision {name}`"
        )
    lacking = [pool.value for pool in Pool if pool not in pools]
    if not lacking:
        return None
    return FailedPrecondition(
        f"no {' and no '.join(lacking)} worker of revision {name!r} is attached, and this "
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
