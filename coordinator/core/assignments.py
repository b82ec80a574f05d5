"""What requests have on workers: who was sent which part of an attempt, and what it takes there."""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.routing.choices import Placement
from baton.coordinator.routing.placers import Placers
from baton.coordinator.state.requests import Request, RequestKey, WorkerKey
from baton.coordinator.state.workers import Worker, WorkerRegistry


class Assignments:
    """Counts each dispatched request on its workers, until it has left them.

    The workers count the tokens they were given and what they have not answered; the placer counts
    work and KV room. Methods that may free something return whether they did, so that another
    request may find room.
    """

    def __init__(self, workers: WorkerRegistry, placers: Placers) -> None:
        self._workers, self._placers = workers, placers

    def assign(
        self, request: Request, placement: Placement, num_tokens: int, *, yields: bool
    ) -> None:
        """Counts a new attempt.

        Args:
            request: with the workers of the attempt.
            placement: what the placer chose.
            num_tokens: prompt and known output.
            yields: see Placer.assign.
        """
        self._placers.of(request.revision).assign(request, placement, yields=yields)
        for key in (request.prefill, request.decode):
            if (worker := self._workers.get(key)) is not None:
                worker.assign(request.key, num_tokens)

    def adopt(self, request: Request, worker: Worker) -> None:
        """Counts an attempt that a worker goes on with from before a restart."""
        self._placers.of(request.revision).adopt(request, worker.key)
        worker.assign(request.key, request.num_tokens)

    def sent(self, request: Request, worker: Worker) -> None:
        """A worker is told to begin with its part of a request."""
        worker.sent(request.key, alone=request.suspect)
        if request.prefill is None:
            worker.local[request.key] = None
        if request.suspect:
            self._placers.refresh(worker)

    def answered(self, request: Request, key: WorkerKey) -> bool:
        """A worker has reported something of the attempt; returns whether it takes others again."""
        worker = self._workers.get(key)
        if worker is None:
            return False
        was_alone = worker.alone
        worker.answered(request.key)
        if was_alone:
            self._placers.refresh(worker)
        return bool(was_alone)

    def prefill_over(self, request: Request) -> bool:
        """The prompt is computed: the prefill worker has only the handoff left to finish."""
        self._placers.of(request.revision).computed(request)
        return self._release(request.prefill, request)

    def handed_over(self, request: Request) -> None:
        """The prefill worker's side of the handoff is over, or no longer matters."""
        worker = self._workers.get(request.prefill)
        if worker is not None:
            worker.sending.pop(request.key, None)

    def let_go(self, request: Request) -> bool:
        """The request leaves all its workers."""
        self.handed_over(request)
        self._placers.of(request.revision).released(request)
        by_prefill = self._release(request.prefill, request)
        return self._release(request.decode, request) or by_prefill

    def check_integrity(self, requests: Mapping[RequestKey, Request]) -> None:
        """Raises AssertionError when a worker has what is not there, or is not assigned to it.

        Args:
            requests: those that have not ended.
        """
        for worker in self._workers:
            assert worker.assigned_tokens == sum(worker.assigned.values())
            for key in worker.assigned:
                assert worker.key in (requests[key].prefill, requests[key].decode)
            assert worker.unanswered.keys() <= worker.assigned.keys()
            assert not worker.alone or worker.alone in worker.unanswered
            assert all(requests[key].prefill == worker.key for key in worker.sending)
        for request in requests.values():
            found = map(self._workers.get, (request.prefill, request.decode))
            assert all(one is None or one.revision == request.revision for one in found)

    def _release(self, key: WorkerKey | None, request: Request) -> bool:
        worker = self._workers.get(key)
        if worker is None:
            return False
        was_alone = worker.alone
        is_released = worker.release(request.key)
        if was_alone:
            # Whoever had it by itself is gone: it takes others again.
            self._placers.refresh(worker)
        return is_released
