"""Tracks batch prompts during their prefill, and picks those to park for interactive prompts."""

from __future__ import annotations

import math
from collections import Counter

from baton.coordinator.routing.choices import NoPlacement, Placement
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.state.requests import RequestKey, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker


class BatchPrompts:
    """The batch prompts that may be parked, each with the prefill worker that computes it.

    Args:
        view: View of the same workers; this class only reads it.
        workers: Workers of one fleet.
    """

    def __init__(self, view: FleetView, workers: AttachedWorkers) -> None:
        self._view, self._workers = view, workers
        self._worker_of: dict[RequestKey, WorkerKey] = {}
        self._num_at: Counter[WorkerKey] = Counter()

    def begins(self, batch: RequestKey, worker: WorkerKey) -> None:
        """Records that a worker starts the prefill of a batch prompt."""
        self._worker_of[batch] = worker
        self._num_at[worker] += 1

    def prefill_done(self, request: RequestKey) -> None:
        """Records that a prompt is computed, or that its request has left the worker.

        Idempotent; ignores interactive prompts.
        """
        worker = self._worker_of.pop(request, None)
        if worker is not None:
            self._num_at[worker] -= 1
            if not self._num_at[worker]:
                del self._num_at[worker]

    def to_park(self, placement: Placement | NoPlacement) -> RequestKey | None:
        """The batch prompt to park for an interactive prompt; None if parking does not help.

        Parking helps only if the interactive prompt would wait for longer than one step, because
        an engine can drop a prompt only between two steps. The worker must also have a prefix
        cache that keeps the blocks computed so far: recomputing them would delay the queue by
        more than the interactive prompt gains.

        Args:
            placement: Planned placement of the interactive request, or why there is none.
        """
        if not self._worker_of:
            return None
        if isinstance(placement, NoPlacement):
            # The queue of every prefill worker is full.
            soonest = self._view.loads.idlest_prefill()
            wait_s = soonest.queued_s(self._view.now) if soonest is not None else math.inf
        elif placement.is_local:
            return None
        else:
            wait_s = placement.prefill.ttft_s - placement.prefill.work_s
        most, found = 0.0, None
        for batch, key in self._worker_of.items():
            entry, worker = self._view.loads.get(key), self._workers.get(key)
            if entry is None or not self.may_be_parked(entry, worker):
                continue
            left_s = entry.queued_s(self._view.now)
            if left_s > max(most, entry.chunk_step_s) and wait_s > entry.chunk_step_s:
                most, found = left_s, batch
        return found

    def may_be_parked(self, entry: WorkerLoad, worker: Worker | None) -> bool:
        """Whether the only prompt on a prefill worker is a batch prompt that may be parked.

        If other prompts were queued after the batch prompt, they would use the freed time.
        """
        return (
            worker is not None
            and worker.hello.capacity.keeps_prefixes
            and entry.num_prefills == 1
            and self._num_at[entry.key] == 1
        )
