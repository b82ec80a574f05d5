"""The Admin service: shows the core's state to operators and executes their commands."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from baton.coordinator.core.core import Core
from baton.coordinator.routing.loads.latency import KindLatency, WorkerKind
from baton.coordinator.server.admin_cache import CacheCalls
from baton.coordinator.server.admin_rollout import RolloutCalls
from baton.coordinator.server.admin_scaling import ScalingCalls
from baton.coordinator.server.intake import Intake
from baton.coordinator.server.profiles import seconds_of
from baton.coordinator.server.shell import Shell
from baton.coordinator.server.stall import StallGuard
from baton.coordinator.server.status import MAX_SAMPLES, sample, status
from baton.coordinator.state import events as ev
from baton.coordinator.state.lanes import LANES, lane_config
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import EndedRequest, PlacementPrediction, Request
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.budget import latency_budget
from baton.coordinator.telemetry.times import timestamp
from baton.runtime.config import BatonConfig
from baton.runtime.durations import duration
from baton.runtime.errors import BatonError, InvalidArgument, NotFound, Unavailable, abort, shown
from baton.runtime.steps.latency_fit import StepErrors
from baton.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2

Q = TypeVar("Q")
A = TypeVar("A")

_ROLES = (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)


class AdminService(admin_pb2_grpc.AdminServicer):
    """The Admin service; scaling calls are in admin_scaling.py, rollouts in admin_rollout.py."""

    def __init__(self, shell: Shell, intake: Intake, config: BatonConfig) -> None:
        self._shell, self._intake, self._config = shell, intake, config
        self._history: deque[admin_pb2.StatusSample] = deque(maxlen=MAX_SAMPLES)
        self._scaling = ScalingCalls(
            shell, config.worker.drain_timeout_s, self._pool, self._snapshot
        )
        self._rollout = RolloutCalls(shell, config)
        self._cache = CacheCalls(shell, config)

    @property
    def _core(self) -> Core:
        return self._shell.core

    async def ListPools(
        self, request: admin_pb2.ListPoolsRequest, context: object
    ) -> admin_pb2.ListPoolsResponse:
        return self._pools()

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: Any
    ) -> admin_pb2.ListWorkersResponse:
        if request.role not in (common_pb2.ROLE_UNSPECIFIED, *_ROLES):
            allowed = "ROLE_PREFILL (1), ROLE_DECODE (2), or 0 for both"
            await abort(context, InvalidArgument("role", int(request.role), allowed))
        return admin_pb2.ListWorkersResponse(workers=self._workers(request.role))

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: object
    ) -> admin_pb2.ListRequestsResponse:
        found: list[Request | EndedRequest] = [*self._core.running()]
        if request.include_ended:
            found += self._core.recently_ended()
        if request.limit:
            found = found[: request.limit]
        now = self._shell.now()
        return admin_pb2.ListRequestsResponse(requests=[_request_info(one, now) for one in found])

    async def GetRequest(
        self, request: admin_pb2.GetRequestRequest, context: Any
    ) -> admin_pb2.RequestInfo:
        found = await _answer(context, self._request, request)
        if found is None:
            of = f" of tenant {shown(request.tenant)}" if request.tenant else ""
            await abort(
                context,
                NotFound(
                    f"request {shown(request.request_id)}{of} is neither running nor among those "
                    "that ended recently"
                ),
            )
        assert found is not None
        info = _request_info(found, self._shell.now())
        self._explain(found, info)
        return info

    async def GetStatus(
        self, request: admin_pb2.GetStatusRequest, context: object
    ) -> admin_pb2.GetStatusResponse:
        found = self._status()
        found.model.CopyFrom(self._intake.model())
        if request.include_history:
            found.history.extend((*self._history, sample(*self._status_arguments())))
        return found

    def sample(self) -> None:
        """Adds the present state to the history; must be called every SAMPLE_S seconds."""
        self._history.append(sample(*self._status_arguments()))

    def _status(self) -> admin_pb2.GetStatusResponse:
        found = status(*self._status_arguments(), self._config)
        found.uptime.CopyFrom(duration(self._shell.now() - self._shell.started_at))
        return found

    def _status_arguments(
        self,
    ) -> tuple[Core, list[admin_pb2.PoolInfo], list[admin_pb2.LaneInfo], float, float]:
        """Arguments of `status` and `sample` for the present moment."""
        pools = [self._pool(role) for role in _ROLES]
        lanes = [self._lane(lane) for lane in LANES]
        return self._core, pools, lanes, self._shell.now(), time.time()

    async def CancelRequest(
        self, request: admin_pb2.CancelRequestRequest, context: Any
    ) -> admin_pb2.CancelRequestResponse:
        found = await _answer(context, self._running_request, request)
        if found is None:
            await abort(context, NotFound(f"request {shown(request.request_id)} is not running"))
        assert found is not None
        self._shell.post(ev.RequestCancelled(found.key))
        return admin_pb2.CancelRequestResponse()

    def _request(self, request: admin_pb2.GetRequestRequest) -> Request | EndedRequest | None:
        return self._core.request(request.request_id, request.tenant)

    def _running_request(self, request: admin_pb2.CancelRequestRequest) -> Request | None:
        return self._core.running_request(request.request_id, request.tenant)

    def _explain(self, request: Request | EndedRequest, info: admin_pb2.RequestInfo) -> None:
        """Adds what only GetRequest returns: budget so far, targets, placement and stalls."""
        core, now = self._core, self._shell.now()
        if isinstance(request, EndedRequest):
            ended_at, session = request.ended_at, request.session
            arrived_at, found = request.arrived_at, request.stalls
            targets_s = request.ttft_target_s, request.itl_target_s
        else:
            ended_at, session = now, request.submission.to.session
            arrived_at, found = request.submission.arrived_at, core.stalls(request)
            info.budget.CopyFrom(latency_budget(request, now))
            submission = request.submission
            targets_s = core.targets.ttft_s(submission), core.targets.itl_s(submission)
        for target, seconds in zip((info.ttft_target, info.itl_target), targets_s, strict=True):
            if seconds is not None:
                target.FromMicroseconds(round(seconds * 1e6))
        if request.placement_prediction is not None:
            info.placement.CopyFrom(_placement_info(request.placement_prediction))
        if request.prompt_sources is not None:
            info.prompt_sources.CopyFrom(admin_pb2.PromptTokens(**request.prompt_sources._asdict()))
        slow = self._shell.client_stalls(session, arrived_at, ended_at)
        for stall in sorted((*found, *slow), key=lambda one: one.start_us):
            info.stalls.add(
                start_us=stall.start_us,
                duration_us=stall.duration_us,
                cause=stall.cause.value,
                worker_id=stall.worker_id,
                by_request_id=stall.by_request_id,
                by_tenant=stall.by_tenant,
                by_tokens=stall.num_tokens,
                num_requests=stall.num_requests,
            )

    async def ScalePool(
        self, request: admin_pb2.ScalePoolRequest, context: Any
    ) -> admin_pb2.ScalePoolResponse:
        return await _answer(context, self._scaling.scale, request)

    async def SetTargets(
        self, request: admin_pb2.SetTargetsRequest, context: Any
    ) -> admin_pb2.SetTargetsResponse:
        return await _answer(context, self._scaling.set_targets, request)

    async def SetAutoscale(
        self, request: admin_pb2.SetAutoscaleRequest, context: Any
    ) -> admin_pb2.SetAutoscaleResponse:
        return await _answer(context, self._scaling.set_autoscale, request)

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: Any
    ) -> admin_pb2.DrainWorkerResponse:
        return await _answer(context, self._scaling.drain, request)

    async def FlipWorker(
        self, request: admin_pb2.FlipWorkerRequest, context: Any
    ) -> admin_pb2.FlipWorkerResponse:
        return await _answer(context, self._scaling.flip, request)

    async def ListDecisions(
        self, request: admin_pb2.ListDecisionsRequest, context: Any
    ) -> admin_pb2.ListDecisionsResponse:
        return await _answer(context, self._scaling.decisions, request)

    async def DropCache(
        self, request: admin_pb2.DropCacheRequest, context: Any
    ) -> admin_pb2.DropCacheResponse:
        try:
            return await self._cache.drop(request)
        except BatonError as error:
            await abort(context, error)
            raise

    async def StartRollout(
        self, request: admin_pb2.StartRolloutRequest, context: Any
    ) -> admin_pb2.StartRolloutResponse:
        return await _answer(context, self._rollout.start, request)

    async def SetRolloutShare(
        self, request: admin_pb2.SetRolloutShareRequest, context: Any
    ) -> admin_pb2.SetRolloutShareResponse:
        return await _answer(context, self._rollout.set_share, request)

    async def GetRollout(
        self, request: admin_pb2.GetRolloutRequest, context: object
    ) -> admin_pb2.RolloutStatus:
        return self._rollout.status()

    async def PromoteRollout(
        self, request: admin_pb2.PromoteRolloutRequest, context: Any
    ) -> admin_pb2.PromoteRolloutResponse:
        return await _answer(context, self._rollout.promote, request)

    async def AbortRollout(
        self, request: admin_pb2.AbortRolloutRequest, context: Any
    ) -> admin_pb2.AbortRolloutResponse:
        return await _answer(context, self._rollout.abort, request)

    async def Watch(self, request: admin_pb2.WatchRequest, context: Any) -> None:  # type: ignore[override]
        try:
            await self._scaling.watch(request, context)
        except BatonError as error:
            await abort(context, error)

    async def Profile(  # type: ignore[override]
        self, request: admin_pb2.ProfileRequest, context: Any
    ) -> None:
        try:
            seconds, worker = seconds_of(request), self._scaling.worker(request.worker_id)
            if not worker.connected:
                raise Unavailable(f"worker {worker.id} is not connected")
            await self._record(worker, seconds, context)
        except BatonError as error:
            await abort(context, error)

    async def _record(self, worker: Worker, seconds: float, context: Any) -> None:
        """Streams a worker's profile until the end or until the caller leaves.

        Raises:
            BatonError: The profile failed.
        """
        profiles = self._shell.profiles
        profile = profiles.begin(worker.key, seconds)
        guard = StallGuard(context, lambda: profiles.end(profile))
        try:
            async with contextlib.aclosing(profiles.events(profile)) as events:
                async for event in events:
                    await guard.write(event)
        finally:
            guard.close()
            profiles.end(profile)

    def _snapshot(self) -> admin_pb2.WatchEvent:
        return admin_pb2.WatchEvent(
            pools=self._pools(),
            workers=self._workers(common_pb2.ROLE_UNSPECIFIED),
            rollout=self._rollout.status(),
        )

    def _pools(self) -> admin_pb2.ListPoolsResponse:
        return admin_pb2.ListPoolsResponse(
            pools=[self._pool(role) for role in _ROLES],
            lanes=[self._lane(lane) for lane in LANES],
            model=self._intake.model(),
            generation=self._shell.generation,
            started_at=timestamp(time.time() - (self._shell.now() - self._shell.started_at)),
            autoscale=self._core.scaler.active and self._core.scaler.autoscale,
            targets=self._scaling.targets(),
        )

    def _workers(self, role: common_pb2.Role.ValueType) -> list[admin_pb2.WorkerInfo]:
        """Workers of one role, or of both, sorted by role and ID."""
        now = self._shell.now()
        names = {worker.hello.kv_address: worker.id for worker in self._core.workers}
        speeds = defaultdict[str, list[admin_pb2.KvSpeed]](list)
        for one in self._core.placers.kv_speeds():
            speeds[one.worker].append(
                admin_pb2.KvSpeed(
                    source=one.source,
                    from_worker_id=one.sender,
                    bytes_per_s=round(one.bytes_per_s),
                )
            )
        workers = [
            _worker_info(
                worker,
                names,
                self._core.latency.describe(WorkerKind.of(worker.hello)),
                now,
                self._config.coordinator.worker_silent_s,
                speeds.get(worker.id, ()),
            )
            for worker in self._core.workers
            if role in (common_pb2.ROLE_UNSPECIFIED, worker.role)
        ]
        workers.sort(key=lambda info: (info.role, info.worker_id))
        return workers

    def _pool(self, role: common_pb2.Role.ValueType) -> admin_pb2.PoolInfo:
        # A pool contains only workers of the stable fleet, not those of a rollout.
        stable = self._core.fleets.stable
        workers = [worker for worker in stable.workers if worker.role == role]
        pool, scaler = POOL_OF[role], self._core.scaler
        floor, ceiling = scaler.limits(pool)
        past = scaler.decisions[pool]
        loads = [worker.load for worker in workers if worker.load is not None]
        serving = sum(worker.serving for worker in workers)
        draining = sum(worker.state == cluster_pb2.WORKER_STATE_DRAINING for worker in workers)
        starting = sum(worker.state == cluster_pb2.WORKER_STATE_STARTING for worker in workers)
        return admin_pb2.PoolInfo(
            role=role,
            num_serving=serving,
            num_starting=starting + scaler.launches.num_starting(pool),
            num_draining=draining,
            desired=scaler.desired(pool),
            min_workers=floor if scaler.active else 0,
            max_workers=ceiling if scaler.active else 0,
            size_by_hand=scaler.by_hand(pool),
            sizes_itself=scaler.sizes_itself(pool),
            reason=past[-1].decision.reason if past else "",
            problem="; ".join(
                filter(None, (scaler.launches.problem(pool), scaler.launches.waiting(pool)))
            ),
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            kv_tokens_used=sum(load.kv_tokens_used for load in loads),
            kv_tokens_total=sum(worker.hello.capacity.kv_tokens for worker in workers),
        )

    def _lane(self, lane: common_pb2.Lane.ValueType) -> admin_pb2.LaneInfo:
        oldest = self._core.oldest_queued(lane)
        waited_s = self._shell.now() - oldest.state_since if oldest is not None else 0.0
        return admin_pb2.LaneInfo(
            lane=lane,
            num_queued=self._core.num_queued(lane),
            num_running=self._core.num_running(lane),
            max_queued=lane_config(self._config.lanes, lane).max_queued,
            oldest_wait=duration(waited_s),
        )


async def _answer(context: Any, call: Callable[[Q], A], request: Q) -> A:
    try:
        return call(request)
    except BatonError as error:
        await abort(context, error)
        raise


def _worker_info(
    worker: Worker,
    names: Mapping[str, str],
    latency: KindLatency,
    now: float,
    silent_s: float,
    kv_speeds: Sequence[admin_pb2.KvSpeed],
) -> admin_pb2.WorkerInfo:
    """Describes a worker; `names` maps KvTransfer addresses to IDs of attached workers."""
    hello = worker.hello
    info = admin_pb2.WorkerInfo(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        role=worker.role,
        state=worker.state,
        model=hello.model,
        capacity=hello.capacity,
        load=worker.load,
        kv_address=hello.kv_address,
        host_id=hello.host_id,
        engine=hello.engine,
        engine_version=hello.engine_version,
        pid=hello.pid,
        attached_at=timestamp(time.time() - (now - worker.attached_at)),
        silent_for=duration(now - worker.heard_at),
        num_requests=len(worker.ledger),
        startup_ms=hello.startup_ms,
        labels=hello.labels,
        revision=worker.fleet.name,
        config_digest=hello.config_digest,
        device_name=hello.device_name,
        latency=_latency_info(latency),
        unresponsive=worker.trouble(now, silent_s),
        flips_to=worker.flip.into if worker.flip is not None else common_pb2.ROLE_UNSPECIFIED,
        kv_speeds=kv_speeds,
    )
    if worker.load is not None:
        info.load.ClearField("peers")
        info.peers.extend(
            admin_pb2.WorkerPeer(
                worker_id=names.get(peer.target, ""),
                target=peer.target,
                transport=peer.transport,
                reason=peer.reason,
            )
            for peer in worker.load.peers
        )
    return info


def _latency_info(latency: KindLatency) -> admin_pb2.LatencyInfo:
    model, quality = latency.model, latency.quality
    return admin_pb2.LatencyInfo(
        prefill_base_ms=model.prefill_base_s * 1e3,
        prefill_per_token_ms=model.prefill_per_token_s * 1e3,
        prefill_per_token_squared_ms=model.prefill_per_token_squared_s * 1e3,
        step_base_ms=model.step_base_s * 1e3,
        step_per_request_ms=model.step_per_request_s * 1e3,
        step_per_kv_token_ms=model.step_per_kv_token_s * 1e3,
        num_samples=quality.num_samples,
        num_rejected=quality.num_rejected,
        num_cold=latency.num_cold,
        error_p50=quality.error_p50,
        error_p90=quality.error_p90,
        mixed_base_ms=model.mixed_base_s * 1e3,
        prefill_errors=_step_errors(quality.prefill_errors),
        decode_errors=_step_errors(quality.decode_errors),
        mixed_errors=_step_errors(quality.mixed_errors),
    )


def _step_errors(errors: StepErrors | None) -> admin_pb2.StepErrors | None:
    return admin_pb2.StepErrors(p50=errors.p50, p90=errors.p90) if errors else None


def _placement_info(predicted: PlacementPrediction) -> admin_pb2.PlacementInfo:
    info = admin_pb2.PlacementInfo(
        prompt_worker_id=predicted.prompt_worker,
        queue=duration(predicted.queue_s),
        computation=duration(predicted.computation_s),
        cached_tokens=predicted.hits.num_device,
        host_tokens=predicted.hits.num_host,
        disk_tokens=predicted.hits.num_disk,
        fetched_tokens=predicted.num_fetched,
        fetched_from=predicted.fetched_from,
        decode_worker_id=predicted.decode_worker,
        host_bytes_per_s=round(predicted.speeds.host),
        disk_bytes_per_s=round(predicted.speeds.disk),
        fetch_bytes_per_s=round(predicted.speeds.fetch),
    )
    if predicted.decode_worker:
        info.step.CopyFrom(duration(predicted.step_s))
    return info


def _request_info(request: Request | EndedRequest, now: float) -> admin_pb2.RequestInfo:
    if isinstance(request, EndedRequest):
        return admin_pb2.RequestInfo(
            request_id=request.request_id,
            state=request.state.value,
            lane=request.lane,
            tenant=request.tenant,
            prompt_tokens=request.num_prompt_tokens,
            completion_tokens=request.num_output_tokens,
            attempt=request.attempt,
            prefill_worker_id=request.prefill_worker_id,
            decode_worker_id=request.decode_worker_id,
            arrived_at=timestamp(time.time() - (now - request.arrived_at)),
            age=duration(request.ended_at - request.arrived_at),
            budget=request.budget,
            error_code=request.error_code,
            error=request.error,
            finish_reason=request.finish_reason,
            route=request.route,
        )
    arrived_at = request.submission.arrived_at
    return admin_pb2.RequestInfo(
        request_id=request.id,
        state=request.state.value,
        lane=request.submission.lane,
        tenant=request.submission.tenant,
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=len(request.token_ids),
        attempt=request.attempt,
        prefill_worker_id=request.prefill[0] if request.prefill is not None else "",
        decode_worker_id=request.decode[0] if request.decode is not None else "",
        arrived_at=timestamp(time.time() - (now - arrived_at)),
        age=duration(now - arrived_at),
        route=request.submission.route,
    )
