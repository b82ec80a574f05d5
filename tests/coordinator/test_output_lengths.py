import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.routing.output_lengths import OutputLengths


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.floats(0, 1))
def test_no_more_than_the_share_asked_for_is_longer(lengths: list[int], quantile: float) -> None:
    outputs = OutputLengths(quantile, window=20)
    for length in lengths:
        outputs.observe("lane", length)
    recent = lengths[-20:]
    expected = outputs.expected("lane", 10_000)
    assert expected in recent
    assert sum(length > expected for length in recent) <= (1 - quantile) * len(recent) + 1e-9


def test_prediction_with_lanes_limits_and_known_tokens() -> None:
    outputs = OutputLengths(0.5, initial_tokens=100)
    assert outputs.expected("a", 1000) == 100
    assert outputs.expected("a", 30) == 30
    for length in (10, 20, 30, 40, 50):
        outputs.observe("a", length)
    assert outputs.expected("a", 1000) == 30
    assert outputs.expected("a", 12) == 12
    assert outputs.expected("b", 1000) == 100
    # Outputs of 40 and 50 tokens are longer than 35. The prediction is 50, so 15 tokens remain.
    assert outputs.expected("a", 1000, num_known_tokens=35) == 15
    # The output is longer than any earlier output.
    assert outputs.expected("a", 1000, num_known_tokens=200) == 200
    assert outputs.expected("a", 201, num_known_tokens=200) == 1


def test_the_mean_is_right_in_sum_where_requests_allow_no_more_than_they_produce() -> None:
    outputs = OutputLengths(initial_tokens=100)
    assert outputs.mean("a", 1000) == 100
    assert outputs.mean("a", 30) == 30
    lengths = (10, 10, 10, 370) * 50
    for length in lengths:
        outputs.observe("a", length)
    expected = sum(outputs.mean("a", length) for length in lengths)
    assert expected == pytest.approx(sum(lengths))


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"quantile is 1.5; must be 0 to 1"):
        OutputLengths(1.5)
    with pytest.raises(ValueError, match="window is 0; must be at least 1"):
        OutputLengths(window=0)
