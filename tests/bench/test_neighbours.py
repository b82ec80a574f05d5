"""Longer gaps of streams beside a prompt."""

import pytest

from baton.bench.neighbours_report import KINDS, Delay, delay_of, report


def test_the_delay_is_what_the_gaps_have_beyond_the_usual_one():
    # A gap is 10 ms; one before the prompt is longer, which does not count.
    gaps_ms = [10, 10, 35, 10, 10, 12, 30, 10, 10]
    times = [sum(gaps_ms[:count]) / 1e3 for count in range(len(gaps_ms) + 1)]
    found = delay_of(times, 5)
    assert (found.longest_gap_ms, found.delay_ms) == pytest.approx((30, 22))


def test_differences_are_those_of_prompts_that_ran_beside_each_other():
    """The machine becomes slower; the median of the differences does not."""
    found = {kind: [Delay(10.0 + n, 20.0 + n) for n in range(5)] for kind in KINDS}
    found["fetched"] = [Delay(12.0 + n, 25.0 + n) for n in range(5)]
    made = report(found)
    assert made["kinds"]["cached"] == {"longest_gap_ms": 12.0, "delay_ms": 22.0}
    assert made["added"]["a fetch"] == {"longest_gap_ms": 2.0, "delay_ms": 5.0}
    assert made["added"]["a store"] == {"longest_gap_ms": 0.0, "delay_ms": 0.0}
