"""Bursty arrivals, and workers that they keep busy."""

from __future__ import annotations

import random

from baton.load.traces import Arrival

SIMULATED = {
    "prefill_base_ms": 20,
    "prefill_per_token_ms": 0.07,
    "step_base_ms": 30,
    "step_per_request_ms": 0.2,
    "step_per_kv_token_ms": 0.0002,
    "kv_tokens": 400_000,
    "max_model_len": 65536,
    "max_num_batched_tokens": 2048,
}


def bursty(rate: float, num_requests: int, mean_prompt: float, mean_output: float) -> list[Arrival]:
    """Poisson arrivals with lengths of an exponential distribution."""
    rng, at, found = random.Random(1), 0.0, []
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        lengths = rng.expovariate(1 / mean_prompt), rng.expovariate(1 / mean_output)
        found.append(Arrival(at, 1 + round(lengths[0]), 2 + round(lengths[1])))
    return found
