"""Observation that the autoscaler decides by, and its state between decisions; all immutable."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton.coordinator.state.demand import Work
from baton.coordinator.state.pools import Pool
from baton.runtime.steps.latency import LatencyModel


class Phase(Enum):
    """Phase of a worker's life that sizing distinguishes."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the autoscaler sees it.

    Attributes:
        since: time when the worker entered its phase, by the core's clock.
        num_tokens: tokens assigned to the worker; the worker with the fewest is drained first.
        gpus: GPUs of the worker; None: as many as its pool's limits say.
        stays: whether the worker was started by another process; the autoscaler then neither drains
            it nor moves it to the other pool.
        responds: whether the worker takes new work. Otherwise it may be drained, but not moved to
            the other pool.
        flips: whether a starting worker comes from the other pool, without a cold start.
    """

    worker_id: str
    pool: Pool
    phase: Phase
    since: float
    num_tokens: int = 0
    gpus: int | None = None
    stays: bool = False
    responds: bool = True
    flips: bool = False


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """Load of one lane. The first four fields are totals since the coordinator started.

    Attributes:
        num_arrived: requests, including requests refused for overload.
        work_s: seconds of prefill work of these requests, without cached prefixes.
        num_output_tokens: expected output tokens of these requests.
        num_kv_tokens: sum of the KV tokens that these requests hold on average during decoding.
        works: prefill work of the latest requests, in any order.
        queued_s: seconds of queued prefill work at workers and in the lane. Work in the lane does
            not count while it waits for room on decode workers.
        num_waiting: requests that wait in the lane and that more workers would run: not those that
            wait for a limit of their tenant or of the lane. `queued_s` leaves those out too.
        num_before_prefill: those of `num_waiting` that wait only for prefill workers of a cell with
            fixed roles. They reach decode workers at the rate of the prefill pool.
        ttft_s: TTFT of one request since the last observation; None: no first token. It is the
            request at the target's percentile when requests are ordered by TTFT divided by their
            own target; with one target for all prompts, this is the percentile of TTFT.
        ttft_target_s: target of that request; None: no first token, or no target.
        num_first: first tokens since the last observation, of requests in the stable fleet that
            were not held (Request.was_held).
        num_late: those of `num_first` that missed the target.
    """

    num_arrived: int = 0
    work_s: float = 0.0
    num_output_tokens: float = 0.0
    num_kv_tokens: float = 0.0
    works: tuple[Work, ...] = ()
    queued_s: float = 0.0
    num_waiting: int = 0
    num_before_prefill: int = 0
    ttft_s: float | None = None
    ttft_target_s: float | None = None
    num_first: int = 0
    num_late: int = 0

    @property
    def num_before_decode(self) -> int:
        """Requests that wait in the lane and would run at once with more decode workers."""
        return self.num_waiting - self.num_before_prefill

    @property
    def required(self) -> tuple[float, ...]:
        """The numbers that a decision needs: finite, and at least 0."""
        return (
            self.num_arrived,
            self.work_s,
            self.num_output_tokens,
            self.num_kv_tokens,
            self.queued_s,
            self.num_waiting,
            *(one.work_s for one in self.works),
        )


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The requests that decode now: in an elastic cell on the workers of both pools.

    Attributes:
        num_decodes: assigned requests, including those still in prefill.
        num_in_prefill: assigned requests that are still in prefill.
        reserved_tokens: KV tokens that all assigned requests need with their expected outputs.
        kv_tokens: KV tokens of one worker's cache.
        most_requests: maximum number of requests per worker regardless of KV room; 0: unknown.
        itl_s: measured step time at the target's percentile of the latest steps; None: no steps.
        itl_predicted_s: step time predicted for the same steps, at the same percentile.
        num_without_targets: assigned requests whose lane has no targets; they make no pool grow.
    """

    num_decodes: int = 0
    num_in_prefill: int = 0
    reserved_tokens: int = 0
    kv_tokens: int = 0
    most_requests: int = 0
    itl_s: float | None = None
    itl_predicted_s: float | None = None
    num_without_targets: int = 0

    @property
    def num_with_targets(self) -> int:
        """Assigned requests of lanes with targets."""
        return self.num_decodes - self.num_without_targets

    @property
    def required(self) -> tuple[float, ...]:
        """The numbers that a decision needs: finite, and at least 0."""
        return self.num_decodes, self.reserved_tokens, self.kv_tokens


@dataclass(frozen=True, slots=True)
class Observation:
    """The input of one decision.

    Attributes:
        observed_at: time of the latest message from any worker, by the core's clock.
        workers: all workers, including starting workers.
        latency: latency model of the decode workers.
        lanes: pairs (lane name, load).
        decode: load of the workers that decode.
        shared: whether the pools share their work: all workers are of one kind, and each computes
            prompts and decodes.
    """

    observed_at: float
    workers: tuple[WorkerView, ...]
    latency: LatencyModel
    lanes: tuple[tuple[str, LaneLoad], ...] = ()
    decode: DecodeLoad = field(default_factory=DecodeLoad)
    shared: bool = False

    @property
    def required(self) -> tuple[float, ...]:
        """The required numbers of the decode pool and of all lanes."""
        return (
            *self.decode.required,
            *(number for _, lane in self.lanes for number in lane.required),
        )

    def of(self, pool: Pool, phase: Phase) -> list[WorkerView]:
        return [one for one in self.workers if one.pool is pool and one.phase is phase]


# ---- State between decisions.


@dataclass(frozen=True, slots=True)
class Sample:
    """Load per second in one interval, summed over all lanes with targets.

    Attributes:
        at: end of the interval, by the core's clock.
        span_s: length of the interval.
        rate: requests per second.
        work: seconds of prefill work per second.
        output_tokens, kv_tokens: as in LaneLoad, per second.
        present: requests between arrival and last token at the end of the interval.
    """

    at: float
    span_s: float
    rate: float
    work: float
    output_tokens: float
    kv_tokens: float
    present: float = 0.0


@dataclass(frozen=True, slots=True)
class Misses:
    """Exponentially decayed counts of requests that miss their target.

    Attributes:
        allowed: number of requests that are allowed to miss their target.
        seen: number of requests that missed their target.
    """

    allowed: float = 0.0
    seen: float = 0.0


class PastNeed(NamedTuple):
    """Number of workers that the load needed at a time.

    Attributes:
        at: time by the core's clock.
        workers: number of workers.
    """

    at: float
    workers: int


NeedHistory = tuple[PastNeed, ...]
"""Needs within the window in which a pool does not shrink, oldest first; see need_history.py."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of one pool.

    Attributes:
        need_history: needs of the pool.
        correction: measured correction factor on predicted latencies.
        misses: missed targets since the correction was last raised.
        small_at: time when the pool was last smaller than needed.
        flipped_in_at: time when the latest worker joined from the other pool.
    """

    need_history: NeedHistory = ()
    correction: float = 1.0
    misses: Misses = field(default_factory=Misses)
    small_at: float = -1e18
    flipped_in_at: float = -1e18


@dataclass(frozen=True, slots=True)
class State:
    """State between two decisions; `State()` is the initial state.

    Attributes:
        now: time of the latest decision.
        lanes: lane loads at the latest decision.
        samples: load history, oldest first.
        total_history: sums of both pools' needs.
        busy_at: time when a request was last present.
    """

    now: float | None = None
    lanes: tuple[tuple[str, LaneLoad], ...] = ()
    samples: tuple[Sample, ...] = ()
    prefill: PoolState = field(default_factory=PoolState)
    decode: PoolState = field(default_factory=PoolState)
    total_history: NeedHistory = ()
    busy_at: float | None = None
