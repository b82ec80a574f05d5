"""Scaling policies to compare Baton's autoscaler with: HPA, a two-loop planner, hindsight."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from baton.coordinator.scaling.autoscale import queueing
from baton.coordinator.scaling.autoscale.members import Members
from baton.coordinator.scaling.autoscale.types import LaneLoad, Observation
from baton.coordinator.state.demand import Work
from baton.coordinator.state.pools import POOLS, Pool
from baton.coordinator.state.scaling_config import ScalingConfig, Targets
from baton.coordinator.state.scaling_decision import Action, Decision, Drain, SetSize
from baton.load.traces import Arrival
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget
from baton.simulator.policies import decision


def _apply(
    observation: Observation, config: ScalingConfig, sizes: dict[Pool, int], reason: str, now: float
) -> Decision:
    """Returns the decision that changes the pools to these sizes, within the configured limits."""
    actions: list[Action] = []
    members = {pool: Members.of(observation, pool, config, now) for pool in POOLS}
    current = {pool: members[pool].current for pool in POOLS}
    target = {}
    for pool in POOLS:
        limits = config.limits(pool)
        target[pool] = min(limits.ceiling, max(limits.floor, sizes[pool]))
    while config.max_gpus is not None and _gpus(target, config) > config.max_gpus:
        growing = max(POOLS, key=lambda pool: target[pool] - current[pool])
        if target[growing] <= current[growing]:
            break
        target[growing] -= 1
    for pool in POOLS:
        if target[pool] > current[pool]:
            actions.append(SetSize(pool, target[pool]))
        for one in members[pool].to_remove(current[pool] - target[pool]):
            actions.append(Drain(one.worker_id, reason))
    return decision(current, target, reason, tuple(actions))


def _gpus(sizes: dict[Pool, int], config: ScalingConfig) -> int:
    return sum(number * config.limits(pool).gpus for pool, number in sizes.items())


def _targets(config: ScalingConfig) -> Targets:
    return dict(config.targets)["interactive"]


class Hpa:
    """Kubernetes' HorizontalPodAutoscaler on queue depth, with its default settings.

    desired = ceil(current * depth / target). A deviation within 10 % changes nothing. In 15 s a
    pool grows by 4 workers or to twice its size, and it shrinks to the largest size desired within
    the last 5 minutes (kubernetes.io, Horizontal Pod Autoscaling). Depth is requests per serving
    worker: for prefill the waiting and running prompts, for decode the assigned requests.

    Args:
        config: Targets and limits.
        prefill_depth, decode_depth: Target depth per worker.
    """

    interval_s = 15.0

    def __init__(self, config: ScalingConfig, prefill_depth: float, decode_depth: float) -> None:
        self.config = config
        self._depths = {Pool.PREFILL: prefill_depth, Pool.DECODE: decode_depth}
        self._wanted: dict[Pool, deque[tuple[float, int]]] = {pool: deque() for pool in POOLS}

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        lanes = [one for _, one in observation.lanes]
        waiting = sum(one.num_waiting for one in lanes)
        depth = {
            Pool.PREFILL: waiting + observation.decode.num_in_prefill,
            Pool.DECODE: observation.decode.num_decodes,
        }
        sizes = {}
        for pool in POOLS:
            members = Members.of(observation, pool, config, now)
            serving = len(members.serving)
            share = depth[pool] / max(1, serving) / self._depths[pool]
            # When the HPA would scale up, it counts pods that are not ready as idle.
            if share > 1:
                share = depth[pool] / max(1, members.current) / self._depths[pool]
            wanted = members.current
            if abs(share - 1) > 0.1:
                wanted = math.ceil(share * members.current)
            past = self._wanted[pool]
            if not past:
                # The size at the start is the first recommendation, as in Kubernetes.
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
        return _apply(observation, config, sizes, reason, now)


def hpa_decode_depth(
    arrivals: Sequence[Arrival],
    latency: LatencyModel,
    itl_s: float,
    max_num_seqs: int,
    kv_tokens: int,
) -> float:
    """Returns HPA's target depth of the decode pool: 80 % of what a worker can hold.

    Args:
        arrivals: Requests of the trace, for their mean length.
        latency: Step times of a worker.
        itl_s: ITL target.
        max_num_seqs: Most requests of a worker's batch.
        kv_tokens: KV cache size of a worker in tokens.
    """
    num_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in arrivals)
    held = max(1.0, num_tokens / max(1, len(arrivals)))
    within_itl = queueing.most_requests(latency, itl_s, held)
    return 0.8 * min(within_itl, max_num_seqs, kv_tokens / held)


class Planner:
    """A policy with two loops, modelled on Dynamo's planner.

    The slow loop runs every 180 s: it divides a moving average of the load by the profiled capacity
    of a worker, and the result is the smallest pool size until its next run. The fast loop runs
    every 5 s and changes a pool by one worker if none is starting: up if the engines exceed the
    targets, down if N-1 workers would stay safely below the targets.

    Args:
        config: Targets and limits.
        latency: Profile of a worker.
        kv_tokens: KV cache size of a decode worker in tokens.
    """

    interval_s = 5.0
    _LONG_S, _WINDOWS, _SAFE = 180.0, 3, 0.8

    def __init__(self, config: ScalingConfig, latency: LatencyModel, kv_tokens: int) -> None:
        self.config, self._latency, self._kv_tokens = config, latency, kv_tokens
        self._seen: tuple[float, LaneLoad] | None = None
        self._history: deque[tuple[float, float, float, float]] = deque(maxlen=self._WINDOWS)
        self._floors = dict.fromkeys(POOLS, 0)

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        load = dict(observation.lanes).get("interactive", LaneLoad())
        members = {pool: Members.of(observation, pool, config, now) for pool in POOLS}
        sizes = {pool: members[pool].current for pool in POOLS}
        reason = "within the targets"
        if self._seen is None:
            # Until the first forecast the pools do not shrink below their initial sizes.
            self._seen, self._floors = (now, load), dict(sizes)
        elif now - self._seen[0] >= self._LONG_S:
            self._forecast(load, _targets(config), now)
            reason = (
                f"the forecast needs {self._floors[Pool.PREFILL]} and {self._floors[Pool.DECODE]}"
            )
        for pool in POOLS:
            if not members[pool].starting:
                num_serving = len(members[pool].serving)
                sizes[pool] += self._step(pool, observation, load, _targets(config), num_serving)
            sizes[pool] = max(sizes[pool], self._floors[pool])
        return _apply(observation, config, sizes, reason, now)

    def _forecast(self, load: LaneLoad, target: Targets, now: float) -> None:
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
        if not rate:
            # Without requests, no length says how many of them a worker could hold.
            self._floors = dict.fromkeys(POOLS, 0)
            return
        self._floors[Pool.PREFILL] = math.ceil(rate * work_s)
        each = queueing.most_requests(self._latency, target.itl_s or math.inf, held)
        if held:
            each = min(each, self._kv_tokens / held)
        step_s = self._latency.decode_step_s(math.ceil(each), math.ceil(each * held))
        self._floors[Pool.DECODE] = math.ceil(rate * outputs * step_s / each)

    def _step(
        self,
        pool: Pool,
        observation: Observation,
        load: LaneLoad,
        target: Targets,
        number: int,
    ) -> int:
        if pool is Pool.PREFILL:
            if target.ttft is None or not load.works:
                return 0
            own_s = sum(one.work_s for one in load.works) / len(load.works)
            # The target of a prompt of mean length.
            num_tokens = sum(one.num_prompt_tokens for one in load.works) / len(load.works)
            ttft_s = target.ttft.of(num_tokens)
            wait_s = load.queued_s / max(1, number)
            if wait_s + own_s > ttft_s:
                return 1
            fewer = load.queued_s / max(1, number - 1) * number / max(1, number - 1) + own_s
            return -1 if number > 1 and fewer < self._SAFE * ttft_s else 0
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
    """Returns the pool sizes that each span of a trace needs, by the autoscaler's queueing theory.

    Args:
        arrivals: The whole trace, in order of time.
        config: Targets and limits.
        latency: Step times of a worker.
        kv_tokens: KV cache size of a decode worker in tokens.
        span_s: Length of a span; the result has one entry per span.
        hit_share: Share of the prompt tokens that come from prefix caches.
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
    # Mean number of decoding requests in each span if every step takes as long as the ITL target.
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
            Work(
                latency.prefill_s(max(1, round(one.num_prompt_tokens * (1 - hit_share)))),
                one.num_prompt_tokens,
            )
            for one in span
        ]
        prefill = queueing.prefill_workers(
            sum(one.work_s for one in works) / span_s,
            works,
            target.ttft or TtftTarget(math.inf),
            target.may_miss,
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
    """A policy that knows the future: it starts workers before a span needs them.

    Args:
        config: Targets and limits.
        sizes: Needed pool sizes, one entry per span.
        span_s: Length of a span in seconds.
        cold_start_s: A worker is ordered this many seconds before the span that needs it.
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

    def decide(self, observation: Observation, config: ScalingConfig, now: float) -> Decision:
        self._began_at = now if self._began_at is None else self._began_at
        first = int((now - self._began_at) / self._span_s)
        last = int((now - self._began_at + self._lead_s + self.interval_s) / self._span_s)
        coming = self._sizes[first : last + 1] or [self._sizes[-1]]
        sizes = {pool: max(one[pool] for one in coming) for pool in POOLS}
        return _apply(observation, config, sizes, "known in hindsight", now)
