"""Why a rollout cannot be started, changed or promoted: in words that name field and value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.pools import POOL_OF, ROLE_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import WorkerRegistry
from baton.runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from baton.runtime.names import REVISION_NAMES, is_revision
from baton.v1 import cluster_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING


def serving(workers: WorkerRegistry, revision: str) -> Counter[Pool]:
    """Workers that serve, by pool."""
    members = workers.of(revision)
    return Counter({pool: len(members.serving(role)) for pool, role in ROLE_OF.items()})


def to_start(workers: WorkerRegistry, pool: Pool, name: str, sizes: Mapping[Pool, int]) -> int:
    """Workers to start of a canary: none where some are attached, one otherwise, unless told."""
    attached = any(POOL_OF.get(one.role) is pool for one in workers.of(name))
    return sizes.get(pool, 0 if attached else 1)


def promoted_size(workers: WorkerRegistry, scaler: Scaler, pool: Pool) -> int:
    """How many workers a canary must have to take the stable revision's place."""
    there = scaler.desired(pool) if scaler.active else serving(workers, workers.stable)[pool]
    return max(1, there)


def canary_gpus(
    workers: WorkerRegistry, scaler: Scaler, revision: Revision, sizes: Mapping[Pool, int]
) -> int:
    """What a canary's workers have, and those that it is to get beside them up to these sizes."""
    there = [one for one in workers.of(revision.name) if one.state != _DRAINING]
    counts = Counter(POOL_OF.get(one.role) for one in there)
    lacking = {pool: max(0, number - counts[pool]) for pool, number in sizes.items()}
    return scaler.gpus_of(there) + scaler.gpus(lacking, revision)


def none_runs() -> BatonError:
    return FailedPrecondition("no rollout runs")


def share_error(share: float) -> BatonError | None:
    return None if 0 <= share <= 1 else InvalidArgument("share", share, "0 to 1")


def start_error(
    workers: WorkerRegistry,
    scaler: Scaler,
    running: str,
    retiring: frozenset[str],
    revision: Revision,
    sizes: Mapping[Pool, int],
) -> BatonError | None:
    """Why this rollout cannot be started; None when it can.

    Args:
        workers: attached.
        scaler: that starts workers, or does not.
        running: the canary of the rollout that runs; empty: none does.
        retiring: revisions that leave.
        revision: what its workers are to run.
        sizes: workers to start, as for `to_start`.
    """
    name = revision.name
    if not is_revision(name):
        return InvalidArgument("revision", name, REVISION_NAMES)
    if name == workers.stable:
        allowed = "must differ from the stable revision's name: workers are told apart by it"
        return InvalidArgument("revision", name, allowed)
    if running:
        return FailedPrecondition(
            f"revision is {name!r}; a rollout of {running!r} runs: promote or abort it first"
        )
    if name in retiring:
        return FailedPrecondition(
            f"revision is {name!r}, whose workers are still finishing what they have: wait until "
            "they have left, or take another name"
        )
    return _workers_error(workers, scaler, revision, sizes) or _gpus_error(
        workers, scaler, revision, {pool: to_start(workers, pool, name, sizes) for pool in Pool}
    )


def promote_error(workers: WorkerRegistry, scaler: Scaler, revision: Revision) -> BatonError | None:
    """Why this canary cannot be promoted; None when it can."""
    name = revision.name
    counts = serving(workers, name)
    for pool in Pool:
        if not counts[pool]:
            launches = scaler.launches
            problem = launches.problem(pool, name) or launches.waiting(pool, name)
            return FailedPrecondition(
                f"revision {name!r} has no {pool.value} worker that serves"
                + (f": {problem}" if problem else "")
            )
        wanted = promoted_size(workers, scaler, pool)
        if not scaler.active and counts[pool] < wanted:
            return FailedPrecondition(
                f"revision {name!r} has {counts[pool]} {pool.value} workers that serve, revision "
                f"{workers.stable!r} {wanted}, and this coordinator starts none: start "
                f"{wanted - counts[pool]} more with --revision {name}, or drain some of revision "
                f"{workers.stable!r}"
            )
    sizes = {pool: promoted_size(workers, scaler, pool) for pool in Pool}
    return _gpus_error(workers, scaler, revision, sizes)


def _workers_error(
    workers: WorkerRegistry, scaler: Scaler, revision: Revision, sizes: Mapping[Pool, int]
) -> BatonError | None:
    name = revision.name
    attached = {POOL_OF.get(one.role) for one in workers.of(name)}
    if scaler.active:
        for pool in Pool:
            most = scaler.limits(pool)[1]
            if sizes.get(pool, 0) > most:
                allowed = f"at most {most}, which is scaling.{pool.value}.max_workers"
                return InvalidArgument(pool.value, sizes[pool], allowed)
            if pool not in attached and not to_start(workers, pool, name, sizes):
                allowed = f"at least 1: no {pool.value} worker of revision {name!r} is attached"
                return InvalidArgument(pool.value, 0, allowed)
        return None
    if revision.model or revision.engine_args or any(sizes.values()):
        return FailedPrecondition(
            "this coordinator starts no workers, so model, engine_args, prefill and decode must be "
            f"left out: start them with `baton worker --revision {name}`"
        )
    lacking = [pool.value for pool in Pool if pool not in attached]
    if not lacking:
        return None
    return FailedPrecondition(
        f"no {' and no '.join(lacking)} worker of revision {name!r} is attached, and this "
        f"coordinator starts none: start them with `baton worker --revision {name}`"
    )


def _gpus_error(
    workers: WorkerRegistry, scaler: Scaler, revision: Revision, wanted: Mapping[Pool, int]
) -> BatonError | None:
    """Why there is no room for so many of a canary beside the others; those there are have it."""
    most, needed = scaler.max_gpus, canary_gpus(workers, scaler, revision, wanted)
    if needed == canary_gpus(workers, scaler, revision, {}):
        return None
    used = scaler.gpus({pool: scaler.desired(pool) for pool in Pool})
    current = (workers.stable, revision.name)
    left = scaler.gpus_of(one for one in workers if one.revision not in current)
    if not scaler.active or most is None or needed + used + left <= most:
        return None
    return FailedPrecondition(
        f"scaling.max_gpus is {most}; {used} are the stable revision's, "
        + (f"{left} are those of revisions that are to leave, " if left else "")
        + f"and the canary would need {needed}: both run side by side for a while"
    )
