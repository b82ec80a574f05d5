"""Other ways to size pools, for comparison: Kubernetes' HPA, a two-loop planner, and hindsight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from baton.coordinator.scaling.autoscale import queueing
from baton.coordinator.scaling.autoscale.sizing import POOLS, Members, leaving
from baton.coordinator.scaling.autoscale.types import LaneLoad, Observation
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig, Targets
from baton.coordinator.state.scaling_decision import Action, Decision, Drain, Want
from baton.load.traces import Arrival
from baton.runtime.latency import LatencyModel
from baton.simulator.policies import decision


def _apply(
    observation: Observation, config: ScalingConfig, sizes: dict[Pool, int], reason: str, now: float
) -> Decision:
    """Actions that lead to these sizes, within the limits."""
    actions: list[Action] = []
    current, target = {}, {}
    for pool in POOLS:
        members = Members.of(observation, pool, config, now)
        limits = config.limits(pool)
        current[pool] = members.current
        target[pool] = min(limits.ceiling, max(limits.floor, sizes[pool]))
        if target[pool] > members.current:
            actions.append(Want(pool, target[pool]))
        for one in leaving(members, members.current - target[pool]):
            actions.append(Drain(one.worker_id, reason))
    return decision(current, target, reason, tuple(actions))


def _targets(config: ScalingConfig) -> Targets:
    return dict(config.targets)["interactive"]


class Hpa:
    """Kubernetes' HorizontalPodAutoscaler on queue depth, with its defaults.

    desired = ceil(current * depth / target), nothing within 10 %; up by 4 workers or to twice as
    many in 15 s, down to the most that was desired within 5 minutes (kubernetes.io, Horizontal Pod
    Autoscaling). The depth is requests per serving worker: of prefill those that wait or are being
    computed, of decode those that are assigned.

    Args:
        prefill_depth, decode_depth: wanted per worker.
    """

    interval_s = 15.0

    def __init__(self, config: ScalingConfig, prefill_depth: float, decode_depth: float) -> None:
        self.config = config
        self._depths = {Pool.PREFILL: prefill_depth, Pool.DECODE: decode_depth}
        self._wanted: dict[Pool, deque[tuple[float, int]]] = {pool: deque() for pool in POOLS}

    def decide(self, observation: Observation, now: float) -> Decision:
        lanes = [one for _, one in observation.lanes]
        waiting = sum(one.num_waiting for one in lanes)
        depth = {
            Pool.PREFILL: waiting + observation.decode.num_in_prefill,
            Pool.DECODE: observation.decode.num_decodes,
        }
        sizes = {}
        for pool in POOLS:
            members = Members.of(observation, pool, self.config, now)
            serving = len(members.serving)
            share = depth[pool] / max(1, serving) / self._depths[pool]
            # Pods that are not ready count as if they used nothing, when it would scale up.
            if share > 1:
                share = depth[pool] / max(1, members.current) / self._depths[pool]
            wanted = members.current
            if abs(share - 1) > 0.1:
                wanted = math.ceil(share * members.current)
            past = self._wanted[pool]
            if not past:
                # As Kubernetes does, the size at the start is the first recommendation.
                past.append((now, members.current))
            past.append((now, wanted))
            while past[0][0] < now - 300:
                past.popleft()
            if wanted < members.current:
                wanted = min(members.current, max(number for _, number in past))
            elif wanted > members.current:
                wanted = min(wanted, max(2 * members.current, members.current + 4))
            sizes[pool] = wanted
        reason = (
            f"{depth[Pool.PREFILL]} requests before their first token, {depth[Pool.DECODE]} in all"
        )
        return _apply(observation, self.config, sizes, reason, now)


class Planner:
    """Two loops in the manner of Dynamo's planner.

    Every 180 s a moving average of request count, input and output length is put through the
    profiled capacity of a worker; its result is the floor until the next time. Every 5 s, while
    nothing starts, one step at a time: up when the engines exceed the targets, down when they would
    be safe at N/(N-1) times the load.

    Args:
        latency: the profile.
        kv_tokens: room of a decode worker.
    """

    interval_s = 5.0
    _LONG_S, _WINDOWS, _SAFE = 180.0, 3, 0.8

    def __init__(self, config: ScalingConfig, latency: LatencyModel, kv_tokens: int) -> None:
        self.config, self._latency, self._kv_tokens = config, latency, kv_tokens
        self._seen: tuple[float, LaneLoad] | None = None
        self._history: deque[tuple[float, float, float, float]] = deque(maxlen=self._WINDOWS)
        self._floors = dict.fromkeys(POOLS, 0)

    def decide(self, observation: Observation, now: float) -> Decision:
        load = dict(observation.lanes).get("interactive", LaneLoad())
        members = {pool: Members.of(observation, pool, self.config, now) for pool in POOLS}
        sizes = {pool: members[pool].current for pool in POOLS}
        reason = "within the targets"
        if self._seen is None:
            # Until there is a forecast the pools do not shrink below what they began with.
            self._seen, self._floors = (now, load), dict(sizes)
        elif now - self._seen[0] >= self._LONG_S:
            self._forecast(load, now)
            reason = (
                f"the forecast needs {self._floors[Pool.PREFILL]} and {self._floors[Pool.DECODE]}"
            )
        for pool in POOLS:
            if not members[pool].starting:
                sizes[pool] += self._step(pool, observation, load, len(members[pool].serving))
            sizes[pool] = max(sizes[pool], self._floors[pool])
        return _apply(observation, self.config, sizes, reason, now)

    def _forecast(self, load: LaneLoad, now: float) -> None:
        assert self._seen is not None
        at, before = self._seen
        span_s, count = now - at, load.num_arrived - before.num_arrived
        self._seen = (now, load)
        outputs = (load.num_output_tokens - before.num_output_tokens) / max(1, count)
        held = (load.num_kv_tokens - before.num_kv_tokens) / max(1, count)
        work_s = (load.work_s - before.work_s) / max(1, count)
        self._history.append((count / span_s, work_s, outputs, held))
        rate, work_s, outputs, held = (
            sum(values) / len(self._history) for values in zip(*self._history, strict=True)
        )
        self._floors[Pool.PREFILL] = math.ceil(rate * work_s)
        target = _targets(self.config)
        each = queueing.most_requests(self._latency, target.itl_s or math.inf, held)
        if held:
            each = min(each, self._kv_tokens / held)
        step_s = self._latency.decode_step_s(math.ceil(each), math.ceil(each * held))
        self._floors[Pool.DECODE] = math.ceil(rate * outputs * step_s / each)

    def _step(self, pool: Pool, observation: Observation, load: LaneLoad, number: int) -> int:
        target = _targets(self.config)
        if pool is Pool.PREFILL:
            if target.ttft_s is None or not load.works_s:
                return 0
            own_s = sum(load.works_s) / len(load.works_s)
            wait_s = load.queued_s / max(1, number)
            if wait_s + own_s > target.ttft_s:
                return 1
            fewer = load.queued_s / max(1, number - 1) * number / max(1, number - 1) + own_s
            return -1 if number > 1 and fewer < self._SAFE * target.ttft_s else 0
        if target.itl_s is None:
            return 0
        now = observation.decode
        if now.itl_s is not None and now.itl_s > target.itl_s:
            return 1
        if number <= 1:
            return 0
        batch, held = now.num_decodes / (number - 1), now.reserved_tokens / (number - 1)
        fewer = self._latency.decode_step_s(math.ceil(batch), math.ceil(held))
        roomy = not now.kv_tokens or held < self._SAFE * now.kv_tokens
        return -1 if fewer < self._SAFE * target.itl_s and roomy else 0


def needed_sizes(
    arrivals: Sequence[Arrival],
    config: ScalingConfig,
    latency: LatencyModel,
    kv_tokens: int,
    *,
    span_s: float = 10.0,
    hit_share: float = 0.0,
) -> list[dict[Pool, int]]:
    """What each span of a trace needs, known in hindsight, by the same queueing theory.

    Args:
        arrivals: in order.
        config: targets.
        latency: what steps cost.
        kv_tokens: room of a decode worker.
        span_s: of each entry of the result.
        hit_share: of prompt tokens that come from caches.
    """
    target = _targets(config)
    num_spans = int(arrivals[-1].at_s / span_s) + 1
    spans: list[list[Arrival]] = [[] for _ in range(num_spans)]
    for one in arrivals:
        spans[int(one.at_s / span_s)].append(one)
    outputs = sum(one.num_output_tokens for one in arrivals) / len(arrivals)
    held = sum(one.num_prompt_tokens + one.num_output_tokens / 2 for one in arrivals) / len(
        arrivals
    )
    each = queueing.most_requests(latency, target.itl_s or math.inf, held)
    each = max(1.0, min(each, kv_tokens / (held + outputs / 2)))
    step_s = latency.decode_step_s(math.ceil(each), math.ceil(each * held))
    found = []
    # Requests that decode in each span, when every step is as long as allowed.
    decoding = [0.0] * num_spans
    for one in arrivals:
        begin, end = one.at_s, one.at_s + one.num_output_tokens * step_s
        index = int(begin / span_s)
        while index < num_spans and index * span_s < end:
            overlap = min(end, (index + 1) * span_s) - max(begin, index * span_s)
            decoding[index] += overlap / span_s
            index += 1
    for span, number in zip(spans, decoding, strict=True):
        works = [
            latency.prefill_s(max(1, round(one.num_prompt_tokens * (1 - hit_share))))
            for one in span
        ]
        prefill = queueing.prefill_workers(
            sum(works) / span_s, works, target.ttft_s or math.inf, target.may_miss
        )
        limits = config.prefill, config.decode
        sizes = prefill, math.ceil(number / each)
        found.append(
            {
                pool: min(limit.ceiling, max(limit.floor, 1, size))
                for pool, limit, size in zip(POOLS, limits, sizes, strict=True)
            }
        )
    return found


class Hindsight:
    """Starts and drains workers so that each span has what it will turn out to need.

    Args:
        sizes: by span.
        cold_start_s: how long before a worker must be asked for.
    """

    def __init__(
        self,
        config: ScalingConfig,
        sizes: Sequence[dict[Pool, int]],
        span_s: float,
        cold_start_s: float,
    ) -> None:
        self.config, self.interval_s = config, 5.0
        self._sizes, self._span_s, self._lead_s = sizes, span_s, cold_start_s
        self._began_at: float | None = None

    def decide(self, observation: Observation, now: float) -> Decision:
        self._began_at = now if self._began_at is None else self._began_at
        first = int((now - self._began_at) / self._span_s)
        last = int((now - self._began_at + self._lead_s + self.interval_s) / self._span_s)
        coming = self._sizes[first : last + 1] or [self._sizes[-1]]
        sizes = {pool: max(one[pool] for one in coming) for pool in POOLS}
        return _apply(observation, self.config, sizes, "known in hindsight", now)
