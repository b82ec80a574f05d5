"""Elastic cells against fixed splits and colocated serving, in the simulator."""

from __future__ import annotations

import pytest

from baton.runtime.config import parse
from baton.simulator.run import simulate
from tests.simulator.bursty_load import SIMULATED, bursty

NUM_WORKERS = 4


def served(arrivals, num_prefill, *, policy="static", elastic=False, max_queue_s=60, ttft_ms=500):
    values = {
        "simulated": SIMULATED,
        "scaling": {"targets": {"interactive": {"ttft_ms": ttft_ms, "itl_ms": 50}}},
        "lanes": {"interactive": {"max_queue_s": max_queue_s}},
        "prefill": {"workers": num_prefill},
        "decode": {"workers": NUM_WORKERS - num_prefill},
        "elastic": elastic,
    }
    return simulate(parse(values, "test"), arrivals, policy).figures


@pytest.mark.parametrize(
    ("rate", "mean_prompt", "mean_output"),
    [
        pytest.param(7, 1200, 200, id="many output tokens"),
        pytest.param(11, 3000, 20, id="prompts"),
        pytest.param(2.6, 200, 1200, id="outputs much longer than prompts"),
    ],
)
def test_an_elastic_cell_needs_no_split(rate, mean_prompt, mean_output):
    arrivals = bursty(rate, 400, mean_prompt, mean_output)
    splits = [served(arrivals, number).attained for number in range(1, NUM_WORKERS)]
    colocated = served(arrivals, 2, policy="colocated").attained
    starts = [served(arrivals, number, elastic=True).attained for number in (1, NUM_WORKERS - 1)]
    assert starts[0] == starts[1]
    assert starts[0] >= max(*splits, colocated) - 0.01
    # The load is not so small that every split serves it.
    assert min(splits) < 0.8


def test_past_capacity_an_elastic_cell_keeps_requests_in_time_and_serves_all_others():
    arrivals = bursty(12, 500, 1200, 200)
    elastic = served(arrivals, 2, elastic=True, max_queue_s=120)
    others = [served(arrivals, number, max_queue_s=120).attained for number in (1, 2, 3)]
    others.append(served(arrivals, 2, policy="colocated").attained)
    assert max(others) < 0.6
    assert elastic.attained > max(others) + 0.2
    assert elastic.num_failed == 0


def test_no_request_waits_for_longer_than_its_lane_allows():
    arrivals = bursty(14, 600, 1200, 200)
    found = served(arrivals, 2, elastic=True, max_queue_s=10)
    assert found.num_failed > 0
    assert found.ttft_ms[99] < 15_000


def test_outputs_that_grow_longer_than_all_that_have_ended_keep_the_itl_target():
    # The first outputs to end are the short ones, so at first the long ones are not expected.
    arrivals = bursty(2.4, 200, 300, 2000)
    found = served(arrivals, 2, elastic=True, ttft_ms=250)
    assert found.attained > 0.97
