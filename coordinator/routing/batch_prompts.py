"""Batch prompts that are being computed, and which of them makes room for an interactive one."""

from __future__ import annotations

import math
from collections import Counter

from baton.coordinator.routing.choices import Placement
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import WorkerLoad
from baton.coordinator.state.requests import RequestKey, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker


class BatchPrompts:
    """The batch prompts that may be told to make room, each on its prefill worker.

    Args:
        router: of these workers; it is only read.
        workers: Workers of one fleet.
    """

    def __init__(self, router: Router, workers: AttachedWorkers) -> None:
        self._router, self._workers = router, workers
        self._worker_of: dict[RequestKey, WorkerKey] = {}
        self._num_at: Counter[WorkerKey] = Counter()

    def begins(self, batch: RequestKey, worker: WorkerKey) -> None:
        """A batch prompt is computed by a worker from now on."""
        self._worker_of[batch] = worker
        self._num_at[worker] += 1

    def over(self, request: RequestKey) -> None:
        """A prompt is not computed any more. Idempotent; ignores interactive ones."""
        worker = self._worker_of.pop(request, None)
        if worker is not None:
            self._num_at[worker] -= 1
            if not self._num_at[worker]:
                del self._num_at[worker]

    def that_yields(self, placement: Placement | None) -> RequestKey | None:
        """The batch prompt that should make room for an interactive one; None where none should.

        Only where the wait is longer than a step: an engine lets go of a prompt between steps. And
        only where what was computed stays in a prefix cache: computing it once more would cost the
        requests behind it more than is won.

        Args:
            placement: where the interactive one would go; None: no worker has room for it.
        """
        if not self._worker_of:
            return None
        if placement is None:
            # Every worker has as much queued as it may.
            soonest = self._router.idlest_prefill()
            wait_s = soonest.queued_s(self._router.now) if soonest is not None else math.inf
        elif placement.prefill is None:
            return None
        else:
            wait_s = placement.prefill.predicted_s - placement.prefill.work_s
        most, found = 0.0, None
        for batch, key in self._worker_of.items():
            entry, worker = self._router.load(key), self._workers.get(key)
            if entry is None or not self.give_way(entry, worker):
                continue
            left_s = entry.queued_s(self._router.now)
            if left_s > max(most, entry.step_s) and wait_s > entry.step_s:
                most, found = left_s, batch
        return found

    def give_way(self, entry: WorkerLoad, worker: Worker | None) -> bool:
        """Whether all that a prefill worker has is a batch prompt that can make room.

        Were there others behind it, they would take the room.
        """
        return (
            worker is not None
            and worker.hello.capacity.keeps_prefixes
            and entry.num_prefills == 1
            and self._num_at[entry.key] == 1
        )
