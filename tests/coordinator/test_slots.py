"""How soon a tenant may have one more request running."""

from __future__ import annotations

import pytest

from baton.coordinator.lanes.slots import Slots


def run(slots: Slots, begin: float, num_requests: int, takes_s: float) -> float:
    """One after another in one of its slots; returns the time by then."""
    for _ in range(num_requests):
        slots.acquire(begin)
        begin += takes_s
        slots.release(begin)
    return begin


def test_there_is_a_slot_or_a_wait_that_grows_with_those_before():
    slots = Slots(2, 0.0)
    assert slots.wait_s(1, 0.0) is None
    now = run(slots, 0.0, 20, 3.0)
    slots.acquire(now)
    assert slots.wait_s(0, now) is None
    slots.acquire(now)
    waits = [slots.wait_s(num_waiting, now) for num_waiting in range(3)]
    assert waits == pytest.approx([1.5, 3.0, 4.5])


def test_the_first_to_run_tell_how_long_they_run_before_they_end():
    slots = Slots(1, 0.0)
    slots.acquire(0.0)
    assert slots.wait_s(0, 0.0) == 0
    assert slots.wait_s(0, 5.0) == pytest.approx(5.0)


def test_a_wait_that_turned_out_longer_is_reckoned_with():
    slots = Slots(1, 0.0)
    now = run(slots, 0.0, 40, 1.0)
    slots.acquire(now)
    predicted = slots.wait_s(0, now)
    now += 2 * predicted
    slots.release(now)
    slots.acquire(now)
    assert slots.wait_s(0, now) > 1.9 * predicted


def test_a_wait_is_not_watched_on_when_one_that_was_before_gives_up():
    slots = Slots(1, 0.0)
    now = run(slots, 0.0, 40, 1.0)
    slots.acquire(now)
    predicted = slots.wait_s(1, now)
    slots.waiter_left()
    slots.release(now + 1)
    slots.acquire(now + 1)
    slots.release(now + 8)
    slots.acquire(now + 8)
    assert slots.wait_s(1, now + 8) < 1.5 * predicted


def test_more_may_run_than_there_are_slots():
    """They were there before this coordinator was."""
    slots = Slots(1, 0.0)
    now = run(slots, 0.0, 10, 1.0)
    for _ in range(3):
        slots.acquire(now)
    assert slots.num_free == 0
    assert slots.wait_s(0, now) == pytest.approx(3.0)
