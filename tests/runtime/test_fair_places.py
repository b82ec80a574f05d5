"""Places that are bounded and shared, as between the tenants of a queue."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.runtime.fair_places import FairPlaces

WEIGHTS = {"heavy": 3.0, "light": 0.1}


def places(limit: int) -> FairPlaces:
    return FairPlaces(limit, lambda tenant: WEIGHTS.get(tenant, 1.0))


def fill(held: FairPlaces, tenant: str) -> int:
    """Takes places until there is no room; returns how many."""
    num = 0
    while held.has_room(tenant):
        held.take(tenant)
        num += 1
    return num


def test_a_tenant_alone_gets_all_places():
    assert fill(places(8), "a") == 8


@pytest.mark.parametrize(("tenant", "share"), [("b", 4), ("heavy", 6), ("light", 1)])
def test_a_later_tenant_gets_its_share_of_a_full_queue(tenant, share):
    held = places(8)
    fill(held, "a")
    assert fill(held, tenant) == share
    assert not held.has_room("a")
    # The first tenant gets a place again when the queue is no longer full.
    for _ in range(share + 1):
        held.give_back("a")
    assert held.has_room("a")


def test_many_tenants_get_at_most_twice_the_limit():
    held = places(8)
    for number in range(100):
        fill(held, f"t{number}")
    assert len(held) == 16


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "heavy", "light"]), st.booleans())))
def test_counts_follow_the_places(steps):
    held, waiting = places(4), Counter[str]()
    for tenant, comes in steps:
        if comes and held.has_room(tenant):
            held.take(tenant)
            waiting[tenant] += 1
        elif not comes and waiting[tenant]:
            held.give_back(tenant)
            waiting[tenant] -= 1
        held.check_integrity(+waiting)
        assert held.num_of(tenant) == waiting[tenant]
        assert len(held) <= 8
