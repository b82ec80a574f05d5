"""Admin calls for pool sizes: scale, targets, autoscale, drain, flip, decisions and watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from baton.coordinator.scaling.decision_log import LoggedDecision
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.server.lane_targets import lane_targets
from baton.coordinator.server.shell import Shell
from baton.coordinator.server.stall import StallGuard
from baton.coordinator.state import events as ev
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import POOL_OF, ROLE_OF, Pool
from baton.coordinator.state.scaling_config import Targets
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry import times
from baton.runtime.counted import counted
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import lane_name
from baton.runtime.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    shown,
)
from baton.runtime.section import MAX_COUNT
from baton.v1 import admin_pb2, cluster_pb2, common_pb2

_Role: TypeAlias = "common_pb2.Role.ValueType"
_ROLES = "ROLE_PREFILL (1) or ROLE_DECODE (2)"
_MAX_WATCHERS = 64
_INTERVAL_S, _SHORTEST_INTERVAL_S = 1.0, 0.1
# Watchers share a snapshot up to this age, because taking a snapshot is expensive.
_MAX_SNAPSHOT_AGE_S = _SHORTEST_INTERVAL_S / 2


class ScalingCalls:
    """Implements the calls; wrong input raises a BatonError.

    Args:
        shell: Shell of the coordinator.
        drain_s: Default drain timeout in seconds.
        pool: Function that describes a pool.
        snapshot: Function that describes the present pools, workers and rollout.
    """

    def __init__(
        self,
        shell: Shell,
        drain_s: float,
        pool: Callable[[_Role], admin_pb2.PoolInfo],
        snapshot: Callable[[], admin_pb2.WatchEvent],
    ) -> None:
        self._shell, self._drain_s = shell, drain_s
        self._pool, self._snapshot = pool, snapshot
        self._watchers = set[object]()
        self._latest_snapshot, self._latest_state = admin_pb2.WatchEvent(), b""
        # Time of the latest snapshot by the core's clock.
        self._latest_at = float("-inf")

    @property
    def _scaler(self) -> Scaler:
        return self._shell.core.scaler

    def scale(self, request: admin_pb2.ScalePoolRequest) -> admin_pb2.ScalePoolResponse:
        pool, scaler = _pool_of(request.role), self._scaler
        refused = scaler.scale_error(pool, request.workers)
        if refused is not None:
            raise refused
        self._shell.post(ev.ScaleRequested(pool, request.workers))
        info = self._pool(request.role)
        past = scaler.decisions[pool]
        message = (
            f"the target size of the {pool.value} pool is {counted(request.workers, 'worker')}; "
            f"workers that serve now: {info.num_serving}"
        )
        if scaler.autoscale:
            message += (
                "; autoscaling keeps this size until `baton autoscale on`, and still sizes the "
                "other pool"
            )
            if past:
                message += f"; the load alone needs {past[-1].decision.needed} workers"
        return admin_pb2.ScalePoolResponse(pool=info, message=message)

    def set_targets(self, request: admin_pb2.SetTargetsRequest) -> admin_pb2.SetTargetsResponse:
        # Where no pool is sized, steps follow the targets, and placement in an elastic cell.
        known, lanes = self._shell.core.targets.by_lane, {lane: lane_name(lane) for lane in LANES}
        changed = dict[str, Targets]()
        for number, asked in enumerate(request.targets):
            if asked.lane not in lanes:
                allowed = "LANE_INTERACTIVE (1) or LANE_BATCH (2)"
                raise InvalidArgument(f"targets[{number}].lane", int(asked.lane), allowed)
            name = lanes[asked.lane]
            changed[name] = _changed(changed.get(name) or known[name], asked, number)
        if changed:
            self._shell.post(ev.TargetsRequested(changed))
        return admin_pb2.SetTargetsResponse(targets=self.targets())

    def targets(self) -> list[admin_pb2.LaneTargets]:
        """Latency targets of all lanes."""
        core = self._shell.core
        found = [lane_targets(lane, core.targets.of_lane(lane)) for lane in LANES]
        longest_gap_s = core.longest_gap_s
        for one in found:
            if one.lane == common_pb2.LANE_INTERACTIVE and longest_gap_s is not None:
                one.longest_gap_ms = round(longest_gap_s * 1e3, 3)
                one.longest_gap_reason = core.gap_reason
        return found

    def set_autoscale(
        self, request: admin_pb2.SetAutoscaleRequest
    ) -> admin_pb2.SetAutoscaleResponse:
        if (refused := self._scaler.error()) is not None:
            raise refused
        self._shell.post(ev.AutoscaleRequested(request.enabled))
        return admin_pb2.SetAutoscaleResponse(enabled=self._scaler.autoscale)

    def drain(self, request: admin_pb2.DrainWorkerRequest) -> admin_pb2.DrainWorkerResponse:
        drain_s = self._drain_s
        if request.HasField("timeout"):
            drain_s = times.drain_s("timeout", request.timeout)
        scaler = self._scaler
        event = ev.DrainRequested(request.worker_id, drain_s, "requested by an operator")
        if scaler.launches.is_starting(request.worker_id):
            self._shell.post(event)
            message = f"{request.worker_id} has not attached yet; its process is stopped"
            return admin_pb2.DrainWorkerResponse(message=message)
        worker = self._worker(request.worker_id)
        message = (
            f"{worker.id} gets no new requests; its requests ({len(worker.ledger)}) end or move to "
            "other workers"
        )
        self._shell.post(event)
        return admin_pb2.DrainWorkerResponse(message=message + self._replacement(worker))

    def flip(self, request: admin_pb2.FlipWorkerRequest) -> admin_pb2.FlipWorkerResponse:
        into = _pool_of(request.role)
        worker = self._worker(request.worker_id)
        if worker.role == worker.next_role == request.role:
            return admin_pb2.FlipWorkerResponse(message=f"{worker.id} serves {into.value} already")
        refused = self._shell.core.flip_error(worker, request.role)
        if refused is not None:
            raise refused
        num_requests = len(worker.ledger)
        self._shell.post(ev.FlipRequested(worker.id, request.role))
        message = (
            f"{worker.id} serves {into.value} once its requests ({num_requests}) have ended or "
            "moved to other workers"
        )
        return admin_pb2.FlipWorkerResponse(message=message)

    def decisions(self, request: admin_pb2.ListDecisionsRequest) -> admin_pb2.ListDecisionsResponse:
        if (refused := self._scaler.error()) is not None:
            raise refused
        pools: Sequence[Pool] = tuple(Pool)
        if request.role != common_pb2.ROLE_UNSPECIFIED:
            pools = [_pool_of(request.role)]
        return admin_pb2.ListDecisionsResponse(
            decisions=[one for pool in pools for one in self._latest(pool, request.limit)]
        )

    async def watch(self, request: admin_pb2.WatchRequest, context: Any) -> None:
        """Writes events until the call is cancelled, one at a time: no event waits in a queue."""
        interval_s = _INTERVAL_S
        if request.HasField("min_interval"):
            interval_s = to_seconds(request.min_interval)
            if not _SHORTEST_INTERVAL_S <= interval_s <= times.LONGEST_S:
                allowed = f"at least {_SHORTEST_INTERVAL_S:g} s"
                raise InvalidArgument("min_interval", f"{interval_s:g} s", allowed)
        if len(self._watchers) >= _MAX_WATCHERS:
            raise ResourceExhausted(
                f"{len(self._watchers)} watchers are connected; at most {_MAX_WATCHERS}",
                reason="TOO_MANY_WATCHERS",
                retry_after_s=interval_s,
            )
        watcher = object()
        self._watchers.add(watcher)
        guard = StallGuard(context, lambda: self._watchers.discard(watcher))
        try:
            decisions_sent_at: float | None = None
            sent_state = b""
            # The first event must show the effect of calls that the caller made before.
            self._take_snapshot()
            while True:
                now = self._shell.now()
                if now - self._latest_at >= _MAX_SNAPSHOT_AGE_S:
                    self._take_snapshot()
                decisions = [_described(one, now) for one in self._decided(decisions_sent_at)]
                decisions_sent_at = now
                if self._latest_state != sent_state or decisions:
                    sent_state = self._latest_state
                    event = admin_pb2.WatchEvent(decisions=decisions)
                    event.MergeFrom(self._latest_snapshot)
                    await guard.write(event)
                await asyncio.sleep(interval_s)
        finally:
            guard.close()
            self._watchers.discard(watcher)

    def worker(self, worker_id: str) -> Worker:
        """The attached worker with this ID. Raises NotFound."""
        worker = self._shell.core.workers.by_id(worker_id)
        if worker is None:
            attached = ", ".join(sorted(one.id for one in self._shell.core.workers)) or "none"
            raise NotFound(f"no worker {shown(worker_id)}; attached: {attached}")
        return worker

    # ---- Private methods

    def _worker(self, worker_id: str) -> Worker:
        worker = self.worker(worker_id)
        if worker.state == cluster_pb2.WORKER_STATE_DRAINING:
            raise FailedPrecondition(f"worker {worker_id} is draining")
        return worker

    def _replacement(self, drained: Worker) -> str:
        """Returns why another worker takes the place of a drained one; empty if none does."""
        core, pool = self._shell.core, POOL_OF[drained.role]
        rollout = core.rollouts.rollout
        if not core.scaler.active:
            return ""
        if drained.fleet is core.fleets.stable and core.scaler.counts(drained.id, pool):
            return (
                f"; the target size of the {pool.value} pool is {core.scaler.desired(pool)}, so "
                "another worker takes its place: to keep one worker less, use `baton scale`"
            )
        if rollout is not None and drained.fleet is rollout.canary:
            num_left = sum(
                one.role == drained.role and one.state != cluster_pb2.WORKER_STATE_DRAINING
                for one in drained.fleet.workers
            )
            if num_left < rollout.sizes[pool]:
                return (
                    f"; the target size of revision {drained.fleet.name}'s {pool.value} pool is "
                    f"{rollout.sizes[pool]}, so another worker takes its place"
                )
        return ""

    def _take_snapshot(self) -> None:
        """Takes a new snapshot for all watchers."""
        self._latest_snapshot, self._latest_at = self._snapshot(), self._shell.now()
        self._latest_state = _comparable_state(self._latest_snapshot)

    def _decided(self, after: float | None) -> list[LoggedDecision]:
        """Decisions after a time, oldest first; None: the newest decision of each pool."""
        past = [list(self._scaler.decisions[pool]) for pool in Pool]
        if after is None:
            return [one for of_pool in past for one in of_pool[-1:]]
        found = (one for of_pool in past for one in of_pool if one.since > after)
        return sorted(found, key=lambda one: one.since)

    def _latest(self, pool: Pool, limit: int) -> list[admin_pb2.ScalingDecision]:
        found = list(reversed(self._scaler.decisions[pool]))
        now = self._shell.now()
        return [_described(one, now) for one in found[: limit or None]]


def _described(one: LoggedDecision, now: float) -> admin_pb2.ScalingDecision:
    # Unix time at which the core's clock is 0.
    epoch = time.time() - now
    return admin_pb2.ScalingDecision(
        at=times.timestamp(epoch + one.at),
        since=times.timestamp(epoch + one.since),
        role=ROLE_OF[one.decision.pool],
        from_workers=one.decision.current,
        to_workers=one.decision.target,
        needed_workers=one.decision.needed,
        reason=one.decision.reason,
        inputs=one.numbers,
    )


def _pool_of(role: _Role) -> Pool:
    pool = POOL_OF.get(role)
    if pool is None:
        raise InvalidArgument("role", int(role), _ROLES)
    return pool


def _changed(known: Targets, asked: admin_pb2.LaneTargets, number: int) -> Targets:
    """Applies a change to targets. Raises InvalidArgument for invalid values."""
    where, found = f"targets[{number}]", known
    for field in ("ttft_ms", "itl_ms", "ttft_ms_per_1k_tokens"):
        if (value := getattr(asked, field)) > MAX_COUNT:
            raise InvalidArgument(f"{where}.{field}", value, f"at most {MAX_COUNT}")
    if asked.HasField("ttft_ms"):
        ttft_s = asked.ttft_ms / 1e3 or None
        slope_s = found.ttft_s_per_1k_tokens if ttft_s is not None else 0.0
        found = replace(found, ttft_s=ttft_s, ttft_s_per_1k_tokens=slope_s)
    if asked.HasField("ttft_ms_per_1k_tokens"):
        if asked.ttft_ms_per_1k_tokens and found.ttft_s is None:
            allowed = "must be 0 for a lane without ttft_ms"
            raise InvalidArgument(
                f"{where}.ttft_ms_per_1k_tokens", asked.ttft_ms_per_1k_tokens, allowed
            )
        found = replace(found, ttft_s_per_1k_tokens=asked.ttft_ms_per_1k_tokens / 1e3)
    if asked.HasField("itl_ms"):
        found = replace(found, itl_s=asked.itl_ms / 1e3 or None)
    if asked.HasField("percentile"):
        if not 0 < asked.percentile < 100:
            allowed = "more than 0 and less than 100"
            raise InvalidArgument(f"{where}.percentile", asked.percentile, allowed)
        found = replace(found, percentile=asked.percentile)
    return found


def _comparable_state(event: admin_pb2.WatchEvent) -> bytes:
    """Serializes a snapshot without the fields that change all the time.

    Watchers get an event if these bytes differ from those of the previous event, or if there are
    new decisions.
    """
    one = admin_pb2.WatchEvent(pools=event.pools, workers=event.workers, rollout=event.rollout)
    one.rollout.ClearField("compared_for")
    for lane in one.pools.lanes:
        lane.ClearField("oldest_wait")
    for worker in one.workers:
        worker.ClearField("silent_for")
        worker.ClearField("latency")
        worker.ClearField("attached_at")
        load = worker.load
        worker.load.CopyFrom(
            cluster_pb2.LoadReport(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                kv_tokens_used=load.kv_tokens_used,
            )
        )
    return one.SerializeToString(deterministic=True)
