"""The cost of scheduling decisions in an elastic cell."""

from __future__ import annotations

from baton.bench import scheduling_cost


def test_every_end_of_a_request_places_the_next_one():
    """The benchmark itself fails if an end places no request or more than one."""
    found = scheduling_cost.measure(num_workers=10, num_queued=70, num_decisions=20)
    assert found.name == "10 workers, 70 queued"
