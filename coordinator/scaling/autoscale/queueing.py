"""Queueing theory: number of workers that a load needs, given the latency model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.coordinator.state.demand import Work
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget

# Upper limit of the computed number of workers.
MOST = 4096
# Requests with less work on average, in seconds, never wait for each other.
_LEAST_WORK_S = 1e-9


def erlang_c(num_workers: int, load: float) -> float:
    """The probability that an arrival waits (Erlang, 1917).

    Args:
        num_workers: workers that serve one queue.
        load: offered load in workers (Erlang). With `num_workers` or more, every arrival waits.
    """
    if load >= num_workers:
        return 1.0
    blocked = 1.0
    for number in range(1, num_workers + 1):
        blocked = load * blocked / (number + load * blocked)
    return blocked / (1 - (load / num_workers) * (1 - blocked))


def share_late(
    num_workers: int,
    load: float,
    works: Sequence[Work],
    target: TtftTarget,
    burstiness: float = 1.0,
) -> float:
    """Share of requests whose wait plus own work exceeds the target.

    A request waits with the Erlang C probability; the wait is exponentially distributed with the
    mean of the Allen-Cunneen approximation for a G/G/c queue (1978). Requests whose own work
    exceeds the target are left out, because more workers would not help them.

    Args:
        num_workers: workers that serve one queue.
        load: seconds of work that arrive per second.
        works: work of a sample of requests.
        target: target for wait plus work.
        burstiness: variance of the number of arrivals relative to Poisson arrivals.
    """
    # Seconds that each request may wait.
    left_s = [left for one in works if (left := _left_s(one, target)) > 0]
    if not left_s:
        return 0.0
    if load >= num_workers:
        return 1.0
    mean = math.fsum(one.work_s for one in works) / len(works)
    squares = math.fsum(one.work_s * one.work_s for one in works) / len(works)
    if mean < _LEAST_WORK_S:
        return 0.0
    # Sum of the squared coefficients of variation of request sizes and of interarrival times.
    spread = squares / (mean * mean) - 1 + burstiness
    waits = erlang_c(num_workers, load)
    decay = 2 * (num_workers - load) / (spread * mean)
    return math.fsum(waits * math.exp(-decay * left) for left in left_s) / len(left_s)


def _left_s(one: Work, target: TtftTarget) -> float:
    return target.of(one.num_prompt_tokens) - one.work_s


def prefill_workers(
    load: float,
    works: Sequence[Work],
    target: TtftTarget,
    may_miss: float,
    burstiness: float = 1.0,
) -> int:
    """Minimum number of workers with which at most the share `may_miss` of requests is late."""
    if not load > 0 or not works:
        return 0
    number = max(1, math.ceil(min(load, MOST)))
    while number < MOST and share_late(number, load, works, target, burstiness) > may_miss:
        number += 1
    return number


def most_requests(latency: LatencyModel, itl_s: float, kv_per_request: float) -> float:
    """Maximum number of concurrent requests on a decode worker; at least 1.

    Args:
        latency: latency model of the worker.
        itl_s: maximum seconds per step.
        kv_per_request: mean number of KV tokens per request.
    """
    slope = latency.step_per_request_s + latency.step_per_kv_token_s * kv_per_request
    return max(1.0, (itl_s - latency.step_base_s) / slope) if slope > 0 else math.inf
