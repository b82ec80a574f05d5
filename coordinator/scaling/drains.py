"""Workers that are to leave: they get nothing new, finish what they have, and are let go."""

from __future__ import annotations

from collections.abc import Callable

from baton.coordinator.routing.placers import Placers
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.v1 import cluster_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING
# A worker is out so long after its time, whatever it does: at the end of its time it frees what it
# holds and says so.
_LEAVE_S = 20.0


class Drains:
    """Owns the workers that said that they drain and have not been let go.

    Args:
        workers: attached ones.
        placers: give them no new work.
        emit: takes effects.
    """

    def __init__(
        self, workers: WorkerRegistry, placers: Placers, emit: Callable[[ev.Effect], None]
    ) -> None:
        self._workers, self._placers, self._emit = workers, placers, emit
        # In the order in which they said so; a set's order would differ between processes.
        self._draining: dict[WorkerKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._draining)

    def begin(self, worker: Worker, timeout_s: float, reason: str, now: float) -> None:
        """Tells a worker to leave within `timeout_s`; some time after that it is taken out."""
        worker.state = _DRAINING
        worker.leaves_by = now + timeout_s + _LEAVE_S
        self._placers.refresh(worker)
        command = cluster_pb2.DrainCommand(reason=reason)
        command.timeout.FromMicroseconds(round(timeout_s * 1e6))
        self._emit(ev.SendCommand(worker.key, command))

    def said(self, worker: Worker) -> None:
        """The worker itself says that it drains."""
        if not worker.released:
            self._draining[worker.key] = None

    def release(self) -> None:
        """Lets draining workers go that nothing is assigned to any more.

        A worker is let go only once it said itself that it drains: all that was sent to it before
        is ahead of this command in its stream.
        """
        for key in tuple(self._draining):
            worker = self._workers.get(key)
            if worker is not None and len(worker.ledger):
                continue
            del self._draining[key]
            if worker is not None:
                worker.released = True
                self._emit(ev.SendCommand(key, cluster_pb2.ReleaseCommand()))
