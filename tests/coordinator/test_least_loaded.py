from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.routing.loads.least_loaded import LeastLoaded


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9))))
def test_the_least_loaded_come_first_and_equals_take_turns(
    changes: list[tuple[int, int | None]],
) -> None:
    index: LeastLoaded[int] = LeastLoaded()
    loads: dict[int, int] = {}
    for key, load in changes:
        if loads.get(key) != load:
            loads.pop(key, None)
        if load is None:
            index.remove(key)
        else:
            index.set(key, load)
            loads[key] = load
        # `loads` is in the order of the latest changes, and min takes the first.
        assert index.least() == min(loads, key=lambda one: loads[one], default=None)
        assert len(index) == len(loads)


def test_memory_is_bounded_by_the_number_of_keys() -> None:
    index: LeastLoaded[int] = LeastLoaded()
    for load in range(10_000):
        index.set(load % 10, load)
    assert len(index._heap) < 200
    assert index.least() == 0
