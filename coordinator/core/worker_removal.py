"""Removes workers that are lost, and takes the requests from workers that do not respond."""

from __future__ import annotations

from enum import Enum

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.parts import Parts
from baton.coordinator.core.request_ends import RequestEnds
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import RequestKey, RequestState
from baton.coordinator.state.workers import Worker
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2


class _Removal(Enum):
    """How a worker is removed.

    Attributes:
        fenced: Whether it is told to end; False if it has ended by itself or goes on.
        blamed: Whether one of the requests that it computed may have crashed it.
        loses_attempts: Whether the attempts on it count as lost (see max_lost_attempts).
    """

    def __init__(self, fenced: bool, blamed: bool, loses_attempts: bool) -> None:
        self.fenced, self.blamed, self.loses_attempts = fenced, blamed, loses_attempts


class Departure(_Removal):
    """How a worker leaves the cell, so that no worker has its ID."""

    # Columns: fenced, blamed, loses_attempts.
    LOST = (True, True, True)
    # It has reported that it stops because of an error.
    FAILED = (False, True, True)
    # It has reported that it stops as it was asked to.
    STOPPED = (False, False, False)
    # Its process has ended while it drained, without such a report.
    EXITED = (False, False, True)


class Succession(_Removal):
    """How a worker makes way for the worker that attaches next under the same ID."""

    # Columns: fenced, blamed, loses_attempts.
    # Another process has its ID.
    REPLACED = (True, True, True)
    # The same, while it drained.
    RESTARTED = (True, False, True)
    # The same process returns from another coordinator, for which it gave up its requests here.
    ELSEWHERE = (False, False, False)


class WorkerRemoval:
    """Removes workers, for ever or until they respond, and recovers their requests.

    Args:
        parts: The shared parts of the core.
        attempts: Recovers requests.
        ends: Fails requests.
        fetches: Prefixes that workers send.
        adoption: Attempts that workers run for an earlier coordinator.
        scaler: Replaces workers.
    """

    def __init__(
        self,
        parts: Parts,
        attempts: Attempts,
        ends: RequestEnds,
        fetches: Fetches,
        adoption: Adoption,
        scaler: Scaler,
    ) -> None:
        self._clock = parts.clock
        self._workers, self._placers, self._latency = parts.workers, parts.placers, parts.latency
        self._requests, self._stats, self._timers = parts.requests, parts.stats, parts.timers
        self._effects, self._room_freed = parts.effects, parts.room_freed
        self._attempts, self._ends, self._fetches = attempts, ends, fetches
        self._adoption, self._scaler = adoption, scaler

    def lose(self, worker: Worker, reason: str, how: Departure = Departure.LOST) -> None:
        """Removes a worker. Its requests are queued again and cancelled on their other workers.

        Args:
            worker: An attached worker.
            reason: Reason in words that continue "worker w1 ...".
            how: How it leaves.
        """
        self._remove(worker, reason, how)

    def make_way(self, worker: Worker, reason: str, how: Succession) -> None:
        """Like `lose`, for a worker whose ID is attached again next.

        The next worker may join the same pool, so the caller calls `left_pool` after it has.
        """
        self._remove(worker, reason, how)

    def suspect(self, worker: Worker, reason: str) -> None:
        """Marks a worker as unresponsive; other workers take over its requests, if there are any.

        The worker stays attached and gets new requests once it responds. Its late reports belong
        to older attempts and are ignored. Requests stay if no other worker could continue them. If
        only the stable fleet could compute them, those that have begun stay too.
        """
        able = worker.fleet.workers.able(worker.role)
        has_peers = able.num_serving > worker.serving
        if not worker.unresponsive and (
            has_peers or worker.fleet is not self._workers.fleets.stable
        ):
            worker.unresponsive = reason
            self._placers.refresh(worker)
            self._stats.worker_unresponsive(self._clock.now)
            self._recover_all(worker, reason, [], with_begun=has_peers, is_out=False)
            self._fetches.lost(worker.key)

    def responds(self, worker: Worker) -> None:
        worker.unresponsive = ""
        self._placers.refresh(worker)
        self._room_freed()

    def left_pool(self, role: common_pb2.Role.ValueType, fleet: Fleet) -> None:
        """Lets parked requests wait for a new worker if the last one for their work has left."""
        if fleet.workers.able(role).num_attached:
            return
        for request in self._requests.all():
            if request.state is RequestState.PARKED and request.fleet is fleet:
                self._attempts.recover_parked(request)

    # ---- Private methods

    def _remove(self, worker: Worker, reason: str, how: Departure | Succession) -> None:
        leaves = isinstance(how, Departure)
        self._workers.remove(worker, reason, may_return=how is Succession.ELSEWHERE)
        self._adoption.lost(worker.key)
        self._placers.detach(worker)
        self._latency.forget(worker.key)
        self._timers.cancel(worker.key)
        if how.fenced or how.blamed:
            self._stats.worker_lost(self._clock.now)
        if leaves:
            drained = worker.state == cluster_pb2.WORKER_STATE_DRAINING
            self._scaler.left(worker.id, reason, wanted=drained)
        suspects = worker.computing() if how.blamed and not worker.unresponsive else []
        self._recover_all(worker, reason, suspects, loses_attempts=how.loses_attempts)
        self._fetches.lost(worker.key)
        if leaves:
            self.left_pool(worker.role, worker.fleet)
        fence = errors.Aborted(f"worker {worker.id} is fenced: it {reason}") if how.fenced else None
        self._effects.add(ev.FenceWorker(worker.key, fence))

    def _recover_all(
        self,
        worker: Worker,
        reason: str,
        suspects: list[RequestKey],
        *,
        with_begun: bool = True,
        is_out: bool = True,
        loses_attempts: bool = True,
    ) -> None:
        lost = f"worker {worker.id} {reason}"
        for key in [*worker.ledger, *worker.ledger.handoffs]:
            request = self._requests.get(key)
            if request is None or worker.key not in (request.prefill, request.decode):
                continue
            if len(request.token_ids) and not with_begun:
                continue
            if not is_out and not worker.can_resume(request):
                continue
            if not loses_attempts:
                self._attempts.worker_left(request)
                continue
            if request.suspect and suspects == [key]:
                error = errors.Internal(
                    f"two workers died while they computed request {request.id}; the last one, "
                    f"worker {worker.id}, {reason}"
                )
                self._ends.fail(request, error)
                continue
            request.suspect |= key in suspects
            self._attempts.recover(request, worker.key, errors.Unavailable(lost))
