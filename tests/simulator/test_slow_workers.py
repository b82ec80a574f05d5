"""Workers whose decode steps alone take most of the ITL target, such as slow CPUs."""

from __future__ import annotations

import random

from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate
from tests.simulator.bursty_load import SIMULATED as GPU
from tests.simulator.bursty_load import bursty

# A prompt of 1,500 tokens takes 2 s, a decode step of one stream 28 ms.
SIMULATED = {
    "prefill_base_ms": 21,
    "prefill_per_token_ms": 1.1,
    "prefill_per_token_squared_ms": 0.00014,
    "step_base_ms": 25,
    "step_per_request_ms": 2.1,
    "step_per_kv_token_ms": 0.0007,
    "kv_tokens": 60000,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
}


def quarter_long(rate: float, num_requests: int) -> list[Arrival]:
    """Returns requests of which a quarter have long prompts and short outputs."""
    rng = random.Random(7)
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(rate)
        num_prompt, num_output = (1500, 8) if rng.random() < 0.25 else (64, 64)
        arrivals.append(Arrival(at_s, num_prompt, num_output))
    return arrivals


def attained(arrivals: list[Arrival], policy: str, simulated=SIMULATED, **targets: int) -> float:
    values = {
        "simulated": simulated,
        "scaling": {"targets": {"interactive": {"ttft_ms": 3000, "itl_ms": 50} | targets}},
        "prefill": {"workers": 1},
        "decode": {"workers": 1},
        "elastic": True,
    }
    return simulate(parse(values, "test"), arrivals, policy).figures.attained


def test_short_prompts_keep_their_targets_past_capacity():
    arrivals = quarter_long(2, 400)
    assert attained(arrivals, "static") > attained(arrivals, "colocated") + 0.3


def test_two_workers_with_hardly_any_time_for_prompts_lose_little_to_plain_servers():
    arrivals = bursty(1.45, 400, 1200, 200)
    elastic, colocated = (
        attained(arrivals, policy, GPU, ttft_ms=500, itl_ms=36)
        for policy in ("static", "colocated")
    )
    assert elastic > colocated - 0.065
    assert colocated > 0.7
