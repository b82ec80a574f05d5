"""Drains workers: a draining worker gets no new requests and leaves after its last request."""

from __future__ import annotations

from collections.abc import Callable

from baton.coordinator.routing.placers import Placers
from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.v1 import cluster_pb2

_DRAINING = cluster_pb2.WORKER_STATE_DRAINING
# Grace period after the drain timeout. At the timeout a worker frees its requests and reports this;
# after the grace period the core removes the worker in any case.
_LEAVE_S = 20.0


class Drains:
    """Owns the workers that have confirmed a drain and are not released yet.

    Args:
        workers: Attached workers.
        placers: Placers, which must give draining workers no new requests.
        emit: Callback for effects.
    """

    def __init__(
        self, workers: WorkerRegistry, placers: Placers, emit: Callable[[ev.Effect], None]
    ) -> None:
        self._workers, self._placers, self._emit = workers, placers, emit
        # Ordered by confirmation; the order of a set would differ between processes.
        self._draining: dict[WorkerKey, None] = {}

    def __bool__(self) -> bool:
        return bool(self._draining)

    def begin(self, worker: Worker, timeout_s: float, reason: str, now: float) -> None:
        """Tells a worker to leave within `timeout_s`; the core removes it _LEAVE_S later."""
        worker.state = _DRAINING
        worker.leaves_by = now + timeout_s + _LEAVE_S
        self._placers.refresh(worker)
        command = cluster_pb2.DrainCommand(reason=reason)
        command.timeout.FromMicroseconds(round(timeout_s * 1e6))
        self._emit(ev.SendCommand(worker.key, command))

    def confirmed(self, worker: Worker) -> None:
        """Records that a worker has confirmed that it drains."""
        if not worker.released:
            self._draining[worker.key] = None

    def release(self) -> None:
        """Releases draining workers without assigned requests.

        A worker is released only after it has confirmed the drain: then all earlier commands are
        ahead of the release in its stream.
        """
        for key in tuple(self._draining):
            worker = self._workers.get(key)
            if worker is not None and len(worker.ledger):
                continue
            del self._draining[key]
            if worker is not None:
                worker.released = True
                self._emit(ev.SendCommand(key, cluster_pb2.ReleaseCommand()))
