"""Builds the autoscaler's observation from the coordinator's core.

The autoscaler sizes the pools of the stable fleet. It ignores a canary's workers, which the rollout
starts. It counts the demand of all requests, including the canary's, so that the stable pools can
take over all requests at any time. Measured latencies are those of the stable fleet, because more
stable workers would not make a canary faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.routing.loads.latency import LatencyRegistry, WorkerKind
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.placers import Placers
from baton.coordinator.scaling.autoscale.types import (
    DecodeLoad,
    LaneLoad,
    Observation,
    Phase,
    WorkerView,
)
from baton.coordinator.state.demand import FirstToken
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.coordinator.state.workers import Worker, WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime.enum_names import lane_name
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import cluster_pb2, common_pb2

_INTERACTIVE = common_pb2.LANE_INTERACTIVE
_DECODE = common_pb2.ROLE_DECODE


class Observer:
    """Reads the load from the core's parts. Each TTFT is in one observation only."""

    def __init__(
        self,
        workers: WorkerRegistry,
        placers: Placers,
        lanes: Lanes,
        stats: CoreStats,
        latency: LatencyRegistry,
        seed: LatencyModel,
    ) -> None:
        self._workers, self._placers, self._lanes = workers, placers, lanes
        self._stats, self._latency, self._seed = stats, latency, seed
        # The most frequent kind of decode worker, when there was a decode worker last.
        self._decode_kind: WorkerKind | None = None

    def observe(
        self, config: ScalingConfig, now: float, starting: Iterable[WorkerView] = ()
    ) -> Observation:
        """Returns the input of a decision.

        Args:
            config: configuration with the percentiles to measure.
            now: time by the core's clock.
            starting: workers that were ordered and have not attached yet.
        """
        stable = self._workers.fleets.stable
        workers = [one for one in stable.workers if one.role in POOL_OF]
        # Draining workers of other fleets hold GPUs until they have left.
        leaving = [
            one
            for one in self._workers
            if one.fleet is not stable
            and one.role in POOL_OF
            and one.state == cluster_pb2.WORKER_STATE_DRAINING
        ]
        # In an elastic cell, all workers decode.
        roles = stable.workers.roles_doing(common_pb2.ROLE_DECODE)
        decoders = [one for one in workers if one.role in roles]
        loads = self._loads(decoders)
        decode = self._decode(loads, decoders, config)
        full = _full(loads, decode)
        # In a strict cell, decode workers may compute prompts too.
        prompts = self._loads(workers)
        interactive_s = sum(entry.interactive_work_s(now) for entry in prompts)
        at_workers_s = {
            _INTERACTIVE: interactive_s,
            common_pb2.LANE_BATCH: sum(entry.work_s(now) for entry in prompts) - interactive_s,
        }
        return Observation(
            observed_at=max((one.heard_at for one in workers), default=now),
            workers=(
                *(_view(one) for one in (*workers, *leaving)),
                *starting,
            ),
            latency=self._decode_model(workers),
            lanes=tuple(
                (
                    lane_name(lane),
                    self._lane(lane, config, at_workers_s.get(lane, 0.0), full, now),
                )
                for lane in LANES
            ),
            decode=decode,
            shared=(
                common_pb2.ROLE_PREFILL in roles
                and len({WorkerKind.of(one.hello) for one in workers}) <= 1
            ),
        )

    def _loads(self, workers: Iterable[Worker]) -> list[WorkerLoad]:
        found = map(self._placers.load, workers)
        return [entry for entry in found if entry is not None]

    def _decode_model(self, workers: Sequence[Worker]) -> LatencyModel:
        """The model of the most frequent kind of decode worker, or of the last such kind."""
        kinds = Counter(
            WorkerKind.of(worker.hello)
            for worker in workers
            if worker.role == common_pb2.ROLE_DECODE
        )
        if kinds:
            self._decode_kind = kinds.most_common(1)[0][0]
        elif self._decode_kind is None and workers:
            return self._model(workers[0])
        return self._seed if self._decode_kind is None else self._latency.model(self._decode_kind)

    def _model(self, worker: Worker) -> LatencyModel:
        return self._latency.model(WorkerKind.of(worker.hello))

    def _lane(
        self,
        lane: common_pb2.Lane.ValueType,
        config: ScalingConfig,
        at_workers_s: float,
        decode_is_full: bool,
        now: float,
    ) -> LaneLoad:
        demand, stable = self._stats.demand[lane], self._workers.fleets.stable
        waits, waiting_s = self._lanes.waits, 0.0
        num_waiting, num_before_prefill = waits.num_runnable(lane), 0
        if not decode_is_full:
            waiting_s = waits.work_s(lane, stable)
            # Outputs end one by one, so that full decode workers often have room for a moment.
            was_full = now - demand.decode_full_at <= config.interval_s
            is_strict = len(stable.workers.roles_doing(_DECODE)) == 1
            if is_strict and not was_full and stable.workers.serving(_DECODE):
                num_before_prefill = num_waiting
        target = dict(config.targets).get(lane_name(lane))
        measured = [one for one in demand.first_tokens if one.revision == stable.name]
        demand.first_tokens.clear()
        num_first, num_late, ttft_s, ttft_target_s = len(measured), 0, None, None
        if target is not None and num_first:
            if target.ttft is None:
                ttft_s = _percentile([(one.ttft_s, 1) for one in measured], target.percentile)
            else:
                firsts = [_TtftRatio.of(one, target.ttft) for one in measured]
                _, ttft_s, ttft_target_s = _percentile(
                    [(one, 1) for one in firsts], target.percentile
                )
                num_late = sum(one.ttft_s > one.target_s for one in firsts)
        return LaneLoad(
            num_arrived=demand.num_arrived,
            work_s=demand.work_s,
            num_output_tokens=demand.num_output_tokens,
            num_kv_tokens=demand.num_kv_tokens,
            works=tuple(demand.works),
            queued_s=at_workers_s + waiting_s,
            num_waiting=num_waiting,
            num_before_prefill=num_before_prefill,
            ttft_s=ttft_s,
            ttft_target_s=ttft_target_s,
            num_first=num_first,
            num_late=num_late,
        )

    def _decode(
        self, loads: Sequence[WorkerLoad], workers: Sequence[Worker], config: ScalingConfig
    ) -> DecodeLoad:
        """Returns the load of workers that decode; `loads` are theirs."""
        num_decodes, num_without_targets = sum(entry.num_decodes for entry in loads), 0
        batch = dict(config.targets).get(lane_name(common_pb2.LANE_BATCH))
        if batch is None or (batch.ttft_s is None and batch.itl_s is None):
            num_without_targets = num_decodes - sum(
                entry.decodes.num_interactive for entry in loads
            )
        view = self._placers.of(self._workers.fleets.stable).view
        steps = [
            (model, step)
            for worker in workers
            if worker.load is not None
            for model in [self._latency.worker_model(worker.key, WorkerKind.of(worker.hello))]
            for step in worker.load.steps
            if step.num_decodes
        ]
        gaps = [(step.duration_us / 1e6, step.num_decodes) for _, step in steps]
        # The prediction includes prompts computed in the same step. Their delay is not an error of
        # the model, and more workers would not avoid it: a decode worker with fewer requests
        # computes even more prompts itself.
        predicted = [
            (
                model.mixed_step_s(
                    step.num_prefill_tokens,
                    step.prefill_token_squares,
                    step.num_decodes,
                    step.num_kv_tokens,
                ),
                step.num_decodes,
            )
            for model, step in steps
        ]
        percentile = min(
            (one.percentile for _, one in config.targets if one.itl_s is not None), default=95.0
        )
        return DecodeLoad(
            num_decodes=num_decodes,
            num_without_targets=num_without_targets,
            num_in_prefill=num_decodes - sum(entry.decodes.num_arrived for entry in loads),
            reserved_tokens=sum(entry.decodes.peak_tokens for entry in loads),
            kv_tokens=min((entry.traits.kv_tokens for entry in loads), default=0),
            most_requests=min(map(view.loads.most_decodes, loads), default=0),
            itl_s=_percentile(gaps, percentile) if gaps else None,
            itl_predicted_s=_percentile(predicted, percentile) if predicted else None,
        )


def _full(loads: Sequence[WorkerLoad], decode: DecodeLoad) -> bool:
    """Whether no worker that decodes has room for another request of average size."""
    if not decode.num_decodes:
        return False
    usual = decode.reserved_tokens / decode.num_decodes
    # free_tokens is negative where outputs are longer than expected.
    return all(
        entry.free_tokens < usual or entry.num_decodes >= decode.most_requests for entry in loads
    )


def _view(worker: Worker) -> WorkerView:
    if worker.flip is not None:
        # A flipping worker counts as a starting worker of its new pool, without a cold start.
        into = POOL_OF[worker.flip.into]
        return WorkerView(worker.id, into, Phase.STARTING, worker.flip.since, flips=True)
    phase = Phase.SERVING if worker.serving else Phase.STARTING
    if worker.state == cluster_pb2.WORKER_STATE_DRAINING:
        phase = Phase.DRAINING
    elif worker.state == cluster_pb2.WORKER_STATE_SERVING:
        # A worker that temporarily does not respond still counts as serving.
        phase = Phase.SERVING
    return WorkerView(
        worker.id,
        POOL_OF[worker.role],
        phase,
        worker.attached_at,
        worker.ledger.num_tokens,
        responds=worker.serving,
    )


class _TtftRatio(NamedTuple):
    """TTFT of a request and its own target, in seconds; ordered by their ratio."""

    ratio: float
    ttft_s: float
    target_s: float

    @classmethod
    def of(cls, one: FirstToken, target: TtftTarget) -> _TtftRatio:
        target_s = target.of(one.num_prompt_tokens)
        return cls(one.ttft_s / target_s, one.ttft_s, target_s)


_Ordered = TypeVar("_Ordered", float, _TtftRatio)


def _percentile(weighted: Sequence[tuple[_Ordered, int]], percent: float) -> _Ordered:
    """Weighted percentile of (value, weight) pairs."""
    ordered = sorted(weighted)
    left = percent / 100 * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0]
