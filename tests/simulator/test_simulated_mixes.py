"""Elastic cells beside the best fixed split, with traffic of one kind that suits the split."""

from __future__ import annotations

import math
import random

import pytest

from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate

# An 8B model on one GPU, and a 70B model on several.
SMALL = {
    "prefill_base_ms": 8,
    "prefill_per_token_ms": 0.05,
    "prefill_per_token_squared_ms": 5e-7,
    "step_base_ms": 9,
    "step_per_request_ms": 0.06,
    "step_per_kv_token_ms": 5e-5,
    "kv_tokens": 400_000,
    "max_model_len": 131072,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
}
LARGE = SMALL | {
    "prefill_base_ms": 30,
    "prefill_per_token_ms": 0.1,
    "prefill_per_token_squared_ms": 1e-6,
    "step_base_ms": 28,
    "step_per_request_ms": 0.1,
    "step_per_kv_token_ms": 3e-5,
    "kv_tokens": 1_000_000,
}


def arrivals(
    rate: float, count: int, prompt: tuple[int, float], output: tuple[int, float]
) -> list[Arrival]:
    """Poisson arrivals; lengths are log-normal, given by their median and deviation."""
    rng, at_s, found = random.Random(3), 0.0, []

    def length(median: int, deviation: float) -> int:
        return min(30000, max(2, int(median * math.exp(rng.gauss(0, deviation)))))

    for _ in range(count):
        at_s += rng.expovariate(rate)
        found.append(Arrival(at_s, length(*prompt), length(*output)))
    return found


def attained(load, prefill: int, decode: int, simulated, *, elastic: bool, **targets: int) -> float:
    values = {
        "simulated": simulated,
        "scaling": {"targets": {"interactive": targets}},
        "prefill": {"workers": prefill},
        "decode": {"workers": decode},
        "elastic": elastic,
    }
    return simulate(parse(values, "test"), load, "static").figures.attained


@pytest.mark.parametrize(
    ("simulated", "load", "targets", "split"),
    [
        pytest.param(
            LARGE,
            (120, 1500, (60, 0.5), (60, 0.6)),
            {"ttft_ms": 500, "itl_ms": 50},
            (1, 3),
            id="short prompts, many of which share a step",
        ),
        pytest.param(
            SMALL,
            (4.1, 500, (9000, 0.8), (90, 0.9)),
            {"ttft_ms": 6800, "itl_ms": 36},
            (3, 1),
            id="long prompts, which shorter ones delay",
        ),
    ],
)
def test_an_elastic_cell_attains_what_the_best_split_does(simulated, load, targets, split):
    requests = arrivals(*load)
    elastic, strict = (
        attained(requests, *split, simulated, elastic=is_elastic, **targets)
        for is_elastic in (True, False)
    )
    assert elastic >= strict - 0.01
