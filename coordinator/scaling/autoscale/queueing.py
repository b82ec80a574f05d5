"""Queueing theory: number of workers that a load needs, given the latency model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.runtime.latency import LatencyModel

# Upper limit of the computed number of workers.
MOST = 4096


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
    works_s: Sequence[float],
    target_s: float,
    burstiness: float = 1.0,
) -> float:
    """Share of requests whose wait plus own work exceeds the target.

    A request waits with the Erlang C probability; the wait is exponentially distributed with the
    mean of the Allen-Cunneen approximation for a G/G/c queue (1978). Requests whose own work
    exceeds the target are left out, because more workers would not help them.

    Args:
        num_workers: workers that serve one queue.
        load: seconds of work that arrive per second.
        works_s: seconds of work of a sample of requests.
        target_s: target for wait plus work.
        burstiness: variance of the number of arrivals relative to Poisson arrivals.
    """
    in_time = [work for work in works_s if work < target_s]
    if not in_time:
        return 0.0
    if load >= num_workers:
        return 1.0
    mean = math.fsum(works_s) / len(works_s)
    squares = math.fsum(work * work for work in works_s) / len(works_s)
    if not mean > 0:
        return 0.0
    # Sum of the squared coefficients of variation of request sizes and of interarrival times.
    spread = squares / (mean * mean) - 1 + burstiness
    waits = erlang_c(num_workers, load)
    decay = 2 * (num_workers - load) / (spread * mean)
    return math.fsum(waits * math.exp(-decay * (target_s - work)) for work in in_time) / len(
        in_time
    )


def prefill_workers(
    load: float,
    works_s: Sequence[float],
    target_s: float,
    may_miss: float,
    burstiness: float = 1.0,
) -> int:
    """Minimum number of workers with which at most the share `may_miss` of requests is late."""
    if not load > 0 or not works_s:
        return 0
    number = max(1, math.ceil(min(load, MOST)))
    while number < MOST and share_late(number, load, works_s, target_s, burstiness) > may_miss:
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
