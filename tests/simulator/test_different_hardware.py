"""Elastic cells whose workers have different hardware."""

from __future__ import annotations

import random

from baton.coordinator.state.pools import Pool
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate

# A worker with much bandwidth, and one that computes prompts twice as fast and decodes half as
# fast: its decode steps take longer than the ITL target.
BANDWIDTH = {
    "prefill_base_ms": 30,
    "prefill_per_token_ms": 0.1,
    "step_base_ms": 28,
    "step_per_request_ms": 0.1,
    "step_per_kv_token_ms": 3e-5,
    "kv_tokens": 1_000_000,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 40_000,
}
COMPUTE = BANDWIDTH | {
    "prefill_base_ms": 15,
    "prefill_per_token_ms": 0.05,
    "step_base_ms": 56,
    "step_per_request_ms": 0.2,
    "step_per_kv_token_ms": 6e-5,
}


def summaries(rate: float, count: int) -> list[Arrival]:
    rng, at_s, found = random.Random(1), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        found.append(Arrival(at_s, rng.randint(5000, 11_000), rng.randint(250, 600)))
    return found


def attained(*, elastic: bool) -> float:
    """Returns the share of requests within both targets."""
    values = {
        "elastic": elastic,
        "simulated": BANDWIDTH,
        "prefill": {"workers": 3},
        "decode": {"workers": 4, "local_prefill": elastic},
        "scaling": {"targets": {"interactive": {"ttft_ms": 6000, "itl_ms": 50}}},
    }
    compute = parse({"simulated": COMPUTE}, "the prefill workers").simulated
    engines = {Pool.PREFILL: compute}
    found = simulate(parse(values, "the cell"), summaries(4.3, 300), "static", engines)
    return found.figures.attained


def test_workers_that_are_made_for_prompts_decode_only_if_the_others_are_full():
    """A few outputs are decoded there at first, until the steps of these workers are measured."""
    assert attained(elastic=False) > 0.99
    assert attained(elastic=True) > 0.95
