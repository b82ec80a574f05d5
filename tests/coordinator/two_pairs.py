"""Helpers for a world with two workers in each pool: commands, silence and crashes."""

from __future__ import annotations

from baton.coordinator.state import events as ev
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE


def pairs(world, **changes):
    """Attaches two workers to each pool; `changes` are fields of the decode workers' hellos."""
    for name in ("p", "p2"):
        world.attach(name, PREFILL)
    for name in ("d", "d2"):
        world.attach(name, DECODE, **changes)
    return world


def commands(world, kind):
    """Returns (worker ID, command) for all commands of this type, grouped by worker."""
    return [
        (name, command)
        for name, sent in world.commands.items()
        for command in sent
        if isinstance(command, kind)
    ]


def prefills(world):
    """Returns (worker ID, command) for all PrefillCommands."""
    return commands(world, cluster_pb2.PrefillCommand)


def decodes(world):
    """Returns (worker ID, command) for all DecodeCommands."""
    return commands(world, cluster_pb2.DecodeCommand)


def latest(found):
    """Returns the (worker ID, command) with the highest attempt number."""
    return max(found, key=lambda one: one[1].spec.attempt)


def hear_all_but(world, *names):
    """Sends a sign of life of every worker except these."""
    for worker in world.core.workers:
        if worker.id not in names:
            world.handle(ev.WorkerHeard(worker.key))


def crash(world, name, incarnation, *, failed=True):
    """A worker reports that it has stopped; with `failed` because its engine died."""
    change = cluster_pb2.WorkerStateChanged(
        state=cluster_pb2.WORKER_STATE_STOPPED, reason="engine: died", failed=failed
    )
    world.handle(ev.WorkerChanged((name, incarnation), change))
