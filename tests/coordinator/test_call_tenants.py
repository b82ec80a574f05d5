"""A call counts for each tenant with a request in it, and for the last one while it has none."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.server.call_tenants import CallTenants

LIMIT = 2


class Calls:
    """Counts the calls of each tenant, at most LIMIT per tenant."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()

    def hold(self, tenant):
        def take():
            if self.held[tenant] >= LIMIT:
                raise PermissionError(tenant)
            self.held[tenant] += 1

            def give_back():
                self.held[tenant] -= 1
                assert self.held[tenant] >= 0

            return give_back

        return take


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "leave", "close"]),
        st.integers(0, 3),
        st.sampled_from("abc"),
        st.integers(0, 99),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_call_counts_for_its_tenants_and_no_tenant_exceeds_its_limit(steps):
    calls, numbers = Calls(), count()
    open_calls = [CallTenants() for _ in range(4)]
    live: list[dict[int, str]] = [{} for _ in open_calls]
    last: list[str | None] = [None for _ in open_calls]
    for step, which, tenant, number in steps:
        call, running = open_calls[which], live[which]
        if step == "enter":
            stream = next(numbers)
            try:
                call.enter(stream, tenant, calls.hold(tenant))
            except PermissionError:
                # The tenant is at its limit, and this call did not count for it yet.
                assert calls.held[tenant] == LIMIT
                assert tenant not in running.values()
            else:
                running[stream], last[which] = tenant, tenant
        elif step == "leave" and running:
            stream = sorted(running)[number % len(running)]
            last[which] = running.pop(stream)
            call.leave(stream)
            call.leave(stream)
        elif step == "close":
            call.release()
            call.release()
            running.clear()
            last[which] = None
        wanted = Counter()
        for one, had in zip(live, last, strict=True):
            wanted.update(set(one.values()) or ({had} if had else set()))
        assert +calls.held == wanted
        assert max(wanted.values(), default=0) <= LIMIT
    assert [bool(call) for call in open_calls] == [one is not None for one in last]
    for call in open_calls:
        call.release()
    assert not +calls.held


def test_a_refused_request_changes_no_count():
    calls, call = Calls(), CallTenants()
    calls.held["b"] = LIMIT
    call.enter(1, "a", calls.hold("a"))
    call.leave(1)
    with pytest.raises(PermissionError):
        call.enter(2, "b", calls.hold("b"))
    call.leave(2)
    assert (calls.held["a"], calls.held["b"]) == (1, LIMIT)
