"""Elastic cells beside the best fixed split, with traffic of one kind that suits the split."""

from __future__ import annotations

import random

import pytest

from baton.bench.random_draws import HARDWARE, LogNormal
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import simulate

SMALL, LARGE = ({**HARDWARE[name], "max_model_len": 131072} for name in ("8b", "70b"))


def arrivals(rate: float, count: int, prompt: LogNormal, output: LogNormal) -> list[Arrival]:
    """Poisson arrivals."""
    rng, at_s, found = random.Random(3), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        lengths = (min(30000, max(2, one.draw(rng))) for one in (prompt, output))
        found.append(Arrival(at_s, *lengths))
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
            (120, 1500, LogNormal(60, 0.5), LogNormal(60, 0.6)),
            {"ttft_ms": 500, "itl_ms": 50},
            (1, 3),
            id="short prompts, many of which share a step",
        ),
        pytest.param(
            SMALL,
            (4.1, 500, LogNormal(9000, 0.8), LogNormal(90, 0.9)),
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
