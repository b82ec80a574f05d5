"""How many workers a load needs, by queueing theory over the latency model. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from baton.runtime.latency import LatencyModel

# Workers: no more are ever counted with, whatever the load is said to be.
MOST = 4096


def erlang_c(num_workers: int, load: float) -> float:
    """The probability that an arrival waits (Erlang, 1917).

    Args:
        num_workers: that serve one queue.
        load: offered, in workers; at least `num_workers` is never served: 1.
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
    """Of requests whose wait and own work exceed the target.

    The wait is taken as exponential beyond its mass at 0, with the mean that Allen and Cunneen give
    for a G/G/c queue (1978). Requests whose own work is longer than the target are left out: no
    number of workers helps them.

    Args:
        num_workers: that serve one queue.
        load: seconds of work that arrive per second.
        works_s: of some requests, in seconds.
        target_s: for wait and work.
        burstiness: of arrivals: the variance of their number over that of independent ones.
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
    # Squared coefficients of variation: of sizes, and of what lies between arrivals.
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
    """The fewest workers with which at most `may_miss` of the requests are late."""
    if not load > 0 or not works_s:
        return 0
    number = max(1, math.ceil(min(load, MOST)))
    while number < MOST and share_late(number, load, works_s, target_s, burstiness) > may_miss:
        number += 1
    return number


def most_requests(latency: LatencyModel, itl_s: float, kv_per_request: float) -> float:
    """Requests that a decode worker may have at a time, at least 1.

    Args:
        latency: of its steps.
        itl_s: at most, per step.
        kv_per_request: KV tokens that one of them holds, on average.
    """
    slope = latency.step_per_request_s + latency.step_per_kv_token_s * kv_per_request
    return max(1.0, (itl_s - latency.step_base_s) / slope) if slope > 0 else math.inf
