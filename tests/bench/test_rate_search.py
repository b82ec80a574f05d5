"""The rate search finds the highest sustainable rate on slow and fast machines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.rate_search import RESOLUTION, RateSearch


@given(limit=st.floats(0.2, 40.0), first=st.floats(0.5, 10.0))
def test_the_highest_rate_is_found_from_below_and_from_above(limit: float, first: float) -> None:
    search = RateSearch(0.9, first)
    for _ in range(40):
        if search.is_done:
            break
        rate = search.next_rate
        search.add(rate, 0.95 if rate <= limit else 0.5)
    assert search.low <= limit <= search.low * RESOLUTION
    assert search.low <= search.rate <= search.low * RESOLUTION


def test_only_tried_rates_count_as_kept() -> None:
    search = RateSearch(0.9, 2.0)
    assert (search.low, search.rate, search.is_done) == (0.0, 0.0, False)
    search.add(search.next_rate, 0.1)
    assert (search.low, search.rate) == (0.0, 0.0)
    search.add(search.next_rate, 1.0)
    assert search.low == pytest.approx(2 / 1.5)
    assert search.low < search.rate < 2
    assert not search.is_done
