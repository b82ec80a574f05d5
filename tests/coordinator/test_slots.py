"""When a tenant at its concurrency limit may run one more request."""

from __future__ import annotations

import pytest

from baton.coordinator.lanes.slots import Slots


def run(slots: Slots, begin: float, num_requests: int, takes_s: float) -> float:
    """Runs requests one after another in one slot; returns the time at their end."""
    for _ in range(num_requests):
        slots.acquire(begin)
        begin += takes_s
        slots.release(begin)
    return begin


def test_without_a_free_slot_the_wait_grows_with_the_requests_before():
    slots = Slots(2, 0.0)
    assert slots.wait_s(1, 0.0) is None
    now = run(slots, 0.0, 20, 3.0)
    slots.acquire(now)
    assert slots.wait_s(0, now) is None
    slots.acquire(now)
    waits = [slots.wait_s(num_waiting, now) for num_waiting in range(3)]
    assert waits == pytest.approx([1.5, 3.0, 4.5])


def test_running_requests_count_before_any_has_ended():
    slots = Slots(1, 0.0)
    slots.acquire(0.0)
    assert slots.wait_s(0, 0.0) == 0
    assert slots.wait_s(0, 5.0) == pytest.approx(5.0)


def test_a_wait_longer_than_predicted_corrects_later_predictions():
    slots = Slots(1, 0.0)
    now = run(slots, 0.0, 40, 1.0)
    slots.acquire(now)
    predicted = slots.wait_s(0, now)
    now += 2 * predicted
    slots.release(now)
    slots.acquire(now)
    assert slots.wait_s(0, now) > 1.9 * predicted


def test_a_wait_does_not_count_if_a_waiting_request_leaves():
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


def test_more_requests_may_run_than_there_are_slots():
    """Workers continue requests from before a restart of the coordinator."""
    slots = Slots(1, 0.0)
    now = run(slots, 0.0, 10, 1.0)
    for _ in range(3):
        slots.acquire(now)
    assert slots.num_free == 0
    assert slots.wait_s(0, now) == pytest.approx(3.0)
