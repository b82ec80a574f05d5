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


class Departure(Enum):
    """How a worker leaves the cell.

    Attributes:
        fenced: Whether it is told to end; False if it has ended by itself or goes on.
        blamed: Whether one of the requests that it computed may have crashed it.
        ended: Whether its ID is free; False if a worker of this ID is attached next.
        orderly: Whether its requests move without a loss: it told the coordinator that it leaves.
    """

    # Columns: fenced, blamed, ended, orderly.
    LOST = (True, True, True, False)
    # It has reported that it stops because of an error.
    FAILED = (False, True, True, False)
    # It has reported that it stops as it was asked to.
    STOPPED = (False, False, True, True)
    # Its process has ended while it drained, without such a report.
    EXITED = (False, False, True, False)
    # Another process has its ID.
    REPLACED = (True, True, False, False)
    # The same, while it drained.
    RESTARTED = (True, False, False, False)
    # It returns from another coordinator, and has forgotten its requests here.
    ELSEWHERE = (False, False, False, True)

    def __init__(self, fenced: bool, blamed: bool, ended: bool, orderly: bool) -> None:
        self.fenced, self.blamed, self.ended, self.orderly = fenced, blamed, ended, orderly


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
            how: How it leaves. If its ID stays in use, the caller then calls `left_pool` if the
                worker of that ID is in another pool.
        """
        self._workers.remove(worker, reason, may_return=how is Departure.ELSEWHERE)
        self._adoption.lost(worker.key)
        self._placers.detach(worker)
        self._latency.forget(worker.key)
        self._timers.cancel(worker.key)
        if how.fenced or how.blamed:
            self._stats.worker_lost(self._clock.now)
        leaves = worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if how.ended:
            self._scaler.left(worker.id, reason, wanted=leaves)
        suspects = worker.computing() if how.blamed and not worker.unresponsive else []
        self._recover_all(worker, reason, suspects, left=how.orderly)
        self._fetches.lost(worker.key)
        if how.ended:
            self.left_pool(worker.role, worker.fleet)
        fence = errors.Aborted(f"worker {worker.id} is fenced: it {reason}") if how.fenced else None
        self._effects.add(ev.FenceWorker(worker.key, fence))

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

    def _recover_all(
        self,
        worker: Worker,
        reason: str,
        suspects: list[RequestKey],
        *,
        with_begun: bool = True,
        is_out: bool = True,
        left: bool = False,
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
            if left:
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
