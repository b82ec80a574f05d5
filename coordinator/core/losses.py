"""Workers that are lost or do not respond, and where their requests go."""

from __future__ import annotations

from collections.abc import Callable

from baton.coordinator.core.adoption import Adoption
from baton.coordinator.core.request_lifecycle import RequestLifecycle
from baton.coordinator.routing.latency import LatencyRegistry
from baton.coordinator.routing.placers import Placers
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import RequestKey, RequestState
from baton.coordinator.state.timers import Timers
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.runtime import errors
from baton.v1 import cluster_pb2, common_pb2


class Losses:
    """Takes workers out, for good or until they respond, and lets their requests go on elsewhere.

    Args:
        emit: takes effects.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        workers: WorkerRegistry,
        placers: Placers,
        latency: LatencyRegistry,
        adoption: Adoption,
        scaler: Scaler,
        timers: Timers,
        emit: Callable[[ev.Effect], None],
    ) -> None:
        self._lifecycle, self._workers, self._placers, self._latency = (
            lifecycle,
            workers,
            placers,
            latency,
        )
        self._adoption, self._scaler, self._timers, self._emit = adoption, scaler, timers, emit

    def lose(
        self,
        worker: Worker,
        reason: str,
        now: float,
        *,
        fenced: bool = True,
        blame: bool = True,
        ended: bool = True,
    ) -> None:
        """Takes a worker out; its requests go on elsewhere, and their other workers are told.

        Args:
            worker: attached.
            reason: in words, continuing "worker w1 ...".
            now: by the core's clock.
            fenced: False when it leaves by itself.
            blame: whether what it computed may be what ended it.
            ended: False when another process goes on under its id, in the same pool or not
                (`left_pool`).
        """
        self._workers.remove(worker, reason)
        self._adoption.lost(worker.key)
        self._placers.detach(worker)
        self._latency.forget(worker.key)
        self._timers.cancel(worker.key)
        if fenced or blame:
            self._lifecycle.stats.worker_lost(now)
        leaves = worker.state == cluster_pb2.WORKER_STATE_DRAINING
        if ended:
            self._scaler.left(worker.id, reason, now, wanted=leaves)
        suspects = worker.computing() if blame and not worker.unresponsive else []
        self._recover_all(worker, reason, suspects, now)
        if ended:
            self.left_pool(worker.role, worker.fleet, now)
        fence = errors.Aborted(f"worker {worker.id} is fenced: it {reason}") if fenced else None
        self._emit(ev.FenceWorker(worker.key, fence))

    def suspect(self, worker: Worker, reason: str, now: float) -> None:
        """A worker does not respond: others take its requests, where there are others.

        It is not out: when it responds again it is given new work. What it then still says of the
        requests that went elsewhere is of an older attempt. Where only the stable fleet could
        take its requests, those stay that have begun, and everywhere those that no other worker
        could go on with.
        """
        has_peers = any(other is not worker for other in worker.fleet.workers.serving(worker.role))
        if not worker.unresponsive and (
            has_peers or worker.fleet is not self._workers.fleets.stable
        ):
            worker.unresponsive = reason
            self._placers.refresh(worker)
            self._lifecycle.stats.worker_unresponsive(now)
            self._recover_all(worker, reason, [], now, with_begun=has_peers, is_out=False)

    def responds(self, worker: Worker) -> None:
        worker.unresponsive = ""
        self._placers.refresh(worker)
        self._lifecycle.room_freed()

    def left_pool(self, role: common_pb2.Role.ValueType, fleet: Fleet, now: float) -> None:
        """A worker has left its pool: if it was the last, parked requests wait for a new one."""
        if fleet.workers.presence(role).num_attached:
            return
        for request in self._lifecycle.requests.all():
            if request.state is RequestState.PARKED and request.fleet is fleet:
                self._lifecycle.strand(request, now)

    # ---- Inside

    def _recover_all(
        self,
        worker: Worker,
        reason: str,
        suspects: list[RequestKey],
        now: float,
        *,
        with_begun: bool = True,
        is_out: bool = True,
    ) -> None:
        lost = f"worker {worker.id} {reason}"
        for key in [*worker.ledger, *worker.ledger.handoffs]:
            request = self._lifecycle.requests.get(key)
            if request is None or worker.key not in (request.prefill, request.decode):
                continue
            if len(request.token_ids) and not with_begun:
                continue
            if not is_out and not worker.can_resume(request):
                continue
            if request.suspect and suspects == [key]:
                error = errors.Internal(
                    f"request {request.id} was what two workers computed when they died; the last, "
                    f"worker {worker.id}, {reason}"
                )
                self._lifecycle.fail(request, error, now)
                continue
            request.suspect |= key in suspects
            self._lifecycle.recover(request, worker.key, errors.Unavailable(lost), now)
