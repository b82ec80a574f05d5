"""Assigns attempts to workers: counts them in the workers' ledgers and in the predicted load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.parts import Parts
from baton.coordinator.routing.choices import Placement
from baton.coordinator.state.requests import Request, RequestKey, RequestState, WorkerKey
from baton.coordinator.state.workers import Worker


class Assignments:
    """Counts each dispatched request on its workers until the request leaves them.

    The ledgers count tokens and unanswered requests; the placer counts predicted work and KV room.

    Args:
        parts: The shared parts of the core.
        fetches: Prefixes that workers send to the prefill workers of requests.
    """

    def __init__(self, parts: Parts, fetches: Fetches) -> None:
        self._workers, self._placers, self._requests = parts.workers, parts.placers, parts.requests
        self._session_blocks, self._room_freed = parts.session_blocks, parts.room_freed
        self._fetches = fetches

    def assign(
        self, request: Request, placement: Placement, num_tokens: int, *, can_be_parked: bool
    ) -> None:
        """Counts a new attempt.

        Args:
            request: The request, with the workers of the attempt.
            placement: The placer's choice.
            num_tokens: Number of tokens of the prompt and the known output.
            can_be_parked: See Placer.assign.
        """
        self._placers.of(request.fleet).assign(request, placement, can_be_parked=can_be_parked)
        for key in (request.prefill, request.decode):
            if (worker := self._workers.get(key)) is not None:
                worker.ledger.assign(request.key, num_tokens)
        self.add_session_blocks(request)

    def add_session_blocks(self, request: Request) -> None:
        """Adds a request's KV blocks to those of its session, when it begins and when it ends."""
        submission = request.submission
        if (session := submission.session) is not None:
            hashes = self._placers.of(request.fleet).prompts.hashes_with_output(request)
            self._session_blocks.add(session, hashes)

    def adopt(self, request: Request, worker: Worker) -> None:
        """Counts an attempt that a worker runs for an earlier coordinator."""
        self._placers.of(request.fleet).adopt(request, worker.key)
        worker.ledger.assign(request.key, request.num_tokens)

    def sent(self, request: Request, worker: Worker) -> None:
        """Records that a worker was told to begin its part of a request."""
        worker.ledger.begin(
            request.key, computes_prompt=request.prefill is None, exclusive=request.suspect
        )
        if request.suspect:
            self._placers.refresh(worker)

    def answered(self, request: Request, key: WorkerKey) -> None:
        """Records that a worker has answered an attempt's command with its first report."""
        worker = self._workers.get(key)
        if worker is None:
            return
        was_exclusive = worker.ledger.exclusive is not None
        worker.ledger.answer(request.key)
        if was_exclusive:
            # The worker takes other requests again.
            self._placers.refresh(worker)
            self._room_freed()

    def begin_handoff(self, request: Request, worker: Worker) -> None:
        """Records that the prefill worker of an attempt sends its KV cache."""
        worker.ledger.begin_handoff(request.key)

    def prefill_done(self, request: Request) -> None:
        """Records that the prompt is computed, so that the prefill worker has room again."""
        self._placers.of(request.fleet).computed(request)
        self._release(request.prefill, request)

    def end_handoff(self, request: Request) -> None:
        """Records that the prefill worker need not send the handoff any longer."""
        worker = self._workers.get(request.prefill)
        if worker is not None:
            worker.ledger.end_handoff(request.key)

    def release(self, request: Request) -> None:
        """Ends an attempt: releases its workers, its fetch and its handle."""
        self._fetches.end(request)
        self._requests.end_attempt(request)
        self.end_handoff(request)
        self._placers.of(request.fleet).released(request)
        self._release(request.prefill, request)
        self._release(request.decode, request)

    def check_integrity(self, requests: Mapping[RequestKey, Request]) -> None:
        """Raises AssertionError when a ledger differs from the requests.

        Args:
            requests: All requests that have not ended.
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
            if request.state is RequestState.DECODING and request.decode is not None:
                entry = self._placers.of(request.fleet).view.loads.get(request.decode)
                assert entry is None or not entry.has_prompt(request.key)

    def _release(self, key: WorkerKey | None, request: Request) -> None:
        worker = self._workers.get(key)
        if worker is None:
            return
        was_exclusive = worker.ledger.exclusive is not None
        if worker.ledger.release(request.key):
            self._room_freed()
        if was_exclusive:
            # A worker runs a suspect request alone. Without that request it takes others again.
            self._placers.refresh(worker)
