"""What requests have on workers: who was sent which part of an attempt, and what it takes there."""

from __future__ import annotations

from collections import defaultdict
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
        self._placers.of(request.fleet).assign(request, placement, yields=yields)
        for key in (request.prefill, request.decode):
            if (worker := self._workers.get(key)) is not None:
                worker.ledger.assign(request.key, num_tokens)

    def adopt(self, request: Request, worker: Worker) -> None:
        """Counts an attempt that a worker goes on with from before a restart."""
        self._placers.of(request.fleet).adopt(request, worker.key)
        worker.ledger.assign(request.key, request.num_tokens)

    def sent(self, request: Request, worker: Worker) -> None:
        """A worker is told to begin with its part of a request."""
        worker.ledger.begin(
            request.key, computes_prompt=request.prefill is None, exclusive=request.suspect
        )
        if request.suspect:
            self._placers.refresh(worker)

    def answered(self, request: Request, key: WorkerKey) -> bool:
        """A worker has reported something of the attempt; returns whether it takes others again."""
        worker = self._workers.get(key)
        if worker is None:
            return False
        was_exclusive = worker.ledger.exclusive is not None
        worker.ledger.answer(request.key)
        if was_exclusive:
            self._placers.refresh(worker)
        return was_exclusive

    def begin_handoff(self, request: Request, worker: Worker) -> None:
        """The prefill worker of the attempt hands its KV cache over."""
        worker.ledger.begin_handoff(request.key)

    def prefill_over(self, request: Request) -> bool:
        """The prompt is computed: the prefill worker has only the handoff left to finish."""
        self._placers.of(request.fleet).computed(request)
        return self._release(request.prefill, request)

    def handed_over(self, request: Request) -> None:
        """The prefill worker's side of the handoff is over, or no longer matters."""
        worker = self._workers.get(request.prefill)
        if worker is not None:
            worker.ledger.end_handoff(request.key)

    def let_go(self, request: Request) -> bool:
        """The request leaves all its workers."""
        self.handed_over(request)
        self._placers.of(request.fleet).released(request)
        by_prefill = self._release(request.prefill, request)
        return self._release(request.decode, request) or by_prefill

    def check_integrity(self, requests: Mapping[RequestKey, Request]) -> None:
        """Raises AssertionError when a worker has what is not there, or is not assigned to it.

        Args:
            requests: those that have not ended.
        """
        parts: defaultdict[WorkerKey | None, dict[RequestKey, bool]] = defaultdict(dict)
        for key, request in requests.items():
            parts[request.decode][key] = False
            parts[request.prefill][key] = True
        for worker in self._workers:
            worker.ledger.check_integrity(parts[worker.key])
        for request in requests.values():
            found = map(self._workers.get, (request.prefill, request.decode))
            assert all(one is None or one.fleet is request.fleet for one in found)

    def _release(self, key: WorkerKey | None, request: Request) -> bool:
        worker = self._workers.get(key)
        if worker is None:
            return False
        was_exclusive = worker.ledger.exclusive is not None
        is_released = worker.ledger.release(request.key)
        if was_exclusive:
            # The suspect request may have left: the worker then takes others again.
            self._placers.refresh(worker)
        return is_released
