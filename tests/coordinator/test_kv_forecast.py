"""Forecasts of the KV tokens that the decodes of a worker need together."""

from __future__ import annotations

import random

import pytest

from baton.coordinator.routing.loads.kv_forecast import KvForecast, KvForecasts
from baton.coordinator.routing.output_lengths import OutputLengths

LANE = "lane"


def forecasts(lengths, sizes, num_prompt=100, max_tokens=100_000):
    """Sums the forecasts of decodes with so many output tokens so far, after these lengths."""
    outputs, found = OutputLengths(), KvForecasts()
    for length in lengths:
        outputs.observe(LANE, length)
    for size in sizes:
        goes_on = outputs.goes_on(LANE, max_tokens, size)
        found.add(KvForecast.of(num_prompt + size, goes_on))
    return found


def test_outputs_that_grow_together_need_their_whole_size():
    found = forecasts([1000] * 64, [0] * 20)
    # All end after the same step, so offsets between which they end make a small difference.
    assert found.peak_tokens == pytest.approx(20 * 1100, rel=0.15)


def test_outputs_of_all_ages_need_little_more_than_they_hold():
    found = forecasts([1000] * 64, range(0, 1000, 10))
    now = sum(100 + size for size in range(0, 1000, 10))
    assert now <= found.peak_tokens < 1.15 * now


def test_uneven_outputs_need_less_than_their_largest_sizes():
    rng = random.Random(1)
    lengths = [int(rng.lognormvariate(7, 0.8)) for _ in range(512)]
    found = forecasts(lengths, [0] * 40)
    largest = 40 * (100 + sorted(lengths)[461])
    assert found.peak_tokens < largest / 2
    assert found.peak_tokens < found.safe_tokens < largest


def test_an_output_that_outlives_all_others_goes_on():
    found = forecasts([50] * 10, [400])
    assert found.peak_tokens >= 100 + 700


def test_no_output_exceeds_its_limit():
    found = forecasts([5000] * 10, [0], max_tokens=200)
    assert found.peak_tokens <= 100 + 220


def test_decodes_that_leave_take_all_with_them():
    rng, found = random.Random(2), KvForecasts()
    added = []
    for _ in range(50):
        size, share = rng.randrange(5000), rng.random()
        added.append(KvForecast.of(size, lambda further, s=share: s if further else 1.0))
        found.add(added[-1])
    for one in added:
        found.remove(one)
    assert (found.peak_tokens, found.safe_tokens) == (0, 0)


def test_a_constant_decode_needs_what_it_holds():
    found = KvForecasts()
    found.add(KvForecast(700))
    found.add(KvForecast(300))
    assert found.peak_tokens == found.safe_tokens == 1000
