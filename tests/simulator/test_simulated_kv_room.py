"""Simulated cells whose KV caches hold fewer outputs than their ITL target allows."""

from __future__ import annotations

import random

from baton.bench.random_draws import HARDWARE, LogNormal
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import COLOCATED, simulate


def served(arrivals, policy="static", *, kv_tokens, elastic):
    values = {
        "simulated": HARDWARE["70b"] | {"kv_tokens": kv_tokens, "max_model_len": 16_384},
        "prefill": {"workers": 1},
        "decode": {"workers": 2},
        "elastic": elastic,
        "scaling": {"targets": {"interactive": {"ttft_ms": 700, "itl_ms": 50}}},
    }
    return simulate(parse(values, "test"), arrivals, policy).figures


def test_outputs_that_end_at_different_times_share_the_kv_cache():
    """Three workers hold the outputs at their present sizes, but not all at their largest ones."""
    rng, at_s, arrivals, output = random.Random(1), 0.0, [], LogNormal(1500, 0.6)
    for _ in range(400):
        at_s += rng.expovariate(1.4)
        arrivals.append(Arrival(at_s, 300, min(9000, output.draw(rng))))
    elastic = served(arrivals, kv_tokens=56_000, elastic=True)
    plain = served(arrivals, COLOCATED, kv_tokens=56_000, elastic=False)
    assert plain.attained > 0.97
    assert elastic.attained > plain.attained - 0.03
