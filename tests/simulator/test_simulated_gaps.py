"""In the simulator, the coordinator's core chooses the gaps that its simulated workers keep."""

from __future__ import annotations

import pytest

from baton.runtime.config import parse
from baton.simulator.run import simulate
from tests.simulator.bursty_load import SIMULATED, bursty

MEAN_PROMPT = 1200


def config(num_workers: int, longest_gap_ms: float | None):
    values = {
        "simulated": SIMULATED,
        "prefill": {"workers": 1},
        "decode": {"workers": num_workers - 1},
        "elastic": True,
        "steps": {"longest_gap_ms": longest_gap_ms},
    }
    return parse(values, "test")


def served(arrivals, num_workers=2, longest_gap_ms=None):
    return simulate(config(num_workers, longest_gap_ms), arrivals, "static").figures


def test_two_busy_workers_attain_more_by_long_gaps():
    arrivals = bursty(4, 1400, MEAN_PROMPT, 250)
    chosen, default, long = (served(arrivals, longest_gap_ms=one) for one in (None, 60, 150))
    assert default.itl_ms[99] < 60 < chosen.itl_ms[99] <= long.itl_ms[99]
    assert default.attained + 0.05 < chosen.attained < long.attained


@pytest.mark.parametrize(
    ("rate", "num_requests", "mean_output", "num_workers"),
    [pytest.param(5, 500, 60, 2, id="short outputs"), pytest.param(7, 700, 250, 4, id="workers")],
)
def test_short_outputs_and_many_workers_keep_the_default(
    rate, num_requests, mean_output, num_workers
):
    arrivals = bursty(rate, num_requests, MEAN_PROMPT, mean_output)
    assert served(arrivals, num_workers) == served(arrivals, num_workers, 60)
