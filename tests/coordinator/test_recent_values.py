from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.telemetry.recent_values import RecentValues


@given(st.lists(st.integers(-5, 5)), st.integers(1, 8), st.floats(0, 1))
def test_only_the_latest_count_and_few_are_larger_than_the_quantile(
    values: list[int], window: int, share: float
) -> None:
    recent = RecentValues[int](window)
    for value in values:
        recent.add(value)
    latest = values[-window:]
    assert recent.ordered == sorted(latest)
    assert recent.total == sum(latest)
    if latest:
        larger = [value for value in latest if value > recent.quantile(share)]
        assert len(larger) <= (1 - share) * len(latest) + 1e-9
