"""Why a rollout cannot be started, changed or promoted: errors that name the field and value."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from baton.coordinator.rollouts.canary_sizes import (
    canary_gpus,
    canary_sizes,
    interchangeable,
    promoted_sizes,
    promotion_sizes,
    serving,
)
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.fleets import Fleet, Fleets
from baton.coordinator.state.pools import POOL_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from baton.runtime.names import REVISION_NAMES, is_revision


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
    return _workers_error(workers.fleets, scaler, attached, revision, sizes) or gpus_error(
        workers, scaler, attached, revision, wanted
    )


def promote_error(
    workers: WorkerRegistry, scaler: Scaler, canary: Fleet, sizes: Mapping[Pool, int]
) -> BatonError | None:
    """Returns why this canary cannot be promoted; None if it can.

    Args:
        workers: All attached workers.
        scaler: Starts workers if it is active.
        canary: The canary.
        sizes: Numbers of workers up to which the coordinator starts canary workers now.
    """
    fleets, launches = workers.fleets, scaler.launches
    name, stable = canary.name, fleets.stable
    counts, promoted = serving(canary.workers), promoted_sizes(fleets, scaler)
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
        wanted = sum(promoted[pool] for pool in group)
        if not scaler.active and num_serving < wanted:
            return FailedPrecondition(
                f"revision {name!r} has {num_serving} serving {kind}s and needs "
                f"{wanted}, as many as revision {stable.name!r}; this coordinator starts none: "
                f"start {wanted - num_serving} more with --revision {name}, or drain some of "
                f"revision {stable.name!r}"
            )
    attached = list(canary.workers)
    grown = promotion_sizes(fleets, scaler, attached, sizes)
    return gpus_error(workers, scaler, attached, canary.revision, grown)


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


def gpus_error(
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
