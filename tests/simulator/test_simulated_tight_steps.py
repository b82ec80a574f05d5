"""Simulated cells of few workers whose decode steps take most of the ITL target."""

from __future__ import annotations

import pytest

from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.simulator.run import COLOCATED, simulate
from tests.simulator.bursty_load import SIMULATED, bursty


def served(arrivals, policy="static", *, num_workers, ttft_ms, itl_ms, elastic=True):
    values = {
        "simulated": SIMULATED,
        "prefill": {"workers": 1},
        "decode": {"workers": num_workers - 1},
        "elastic": elastic,
        "scaling": {"targets": {"interactive": {"ttft_ms": ttft_ms, "itl_ms": itl_ms}}},
    }
    return simulate(parse(values, "test"), arrivals, policy).figures


@pytest.mark.parametrize(
    ("itl_ms", "rate", "mean_prompt", "mean_output"),
    [
        pytest.param(33, 1.0, 300, 400, id="streams near the target"),
        pytest.param(38, 1.2, 1000, 60, id="short outputs"),
    ],
)
def test_two_workers_attain_as_much_as_plain_servers(itl_ms, rate, mean_prompt, mean_output):
    arrivals = bursty(rate, 250, mean_prompt, mean_output)
    targets = {"num_workers": 2, "ttft_ms": 500, "itl_ms": itl_ms}
    elastic = served(arrivals, **targets)
    plain = served(arrivals, COLOCATED, elastic=False, **targets)
    assert elastic.attained > plain.attained - 0.03
    assert elastic.ttft_ms[99] < 5_000


def test_a_late_prompt_does_not_wait_while_hardly_any_prompts_come():
    arrivals = [Arrival(6.0 * number, 300, 400) for number in range(20)]
    # No worker computes this prompt in time.
    arrivals.append(Arrival(60.5, 9000, 400))
    found = served(sorted(arrivals), num_workers=2, ttft_ms=300, itl_ms=38)
    assert found.ttft_ms[99] < 5_000
