"""Fairness counters of tenants, the batch lane's deficit counter, and rate limits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.coordinator.lanes.fairness import Account, BatchDeficit, FairOrder, TokenBucket

COSTS = st.integers(1, 1000)


@st.composite
def histories(draw):
    """Operations on six accounts: join, leave, charge, credit, or take a turn and be charged."""
    names = st.sampled_from(["join", "leave", "charge", "credit", "turn"])
    return draw(st.lists(st.tuples(names, st.integers(0, 5), COSTS), max_size=120))


def play(history, accounts, order, check):
    for name, index, cost in history:
        account = accounts[index]
        if name == "turn":
            account = order.first()
            if account is not None:
                order.took_turn(account)
                order.charge(account, cost)
        elif name == "join" and account.item is None:
            order.join(account)
        elif name == "leave" and account.item is not None:
            order.leave(account)
        elif name in ("charge", "credit"):
            getattr(order, name)(account, cost)
        order.check_integrity()
        check(name, account)


@given(histories())
def test_the_smallest_counter_is_next_and_among_equals_the_one_served_longest_ago(history):
    accounts = [Account(weight) for weight in (0.5, 1, 1, 2, 3, 4)]
    order: FairOrder[Account] = FairOrder()

    def check(name, account):
        active = [one for one in accounts if one.item is not None]
        assert len(order) == len(active)
        first = order.first()
        assert (first is None) == (not active)
        if first is not None:
            assert first in active
            assert (first.counter, first.turn) == min((one.counter, one.turn) for one in active)

    play(history, accounts, order, check)


@given(histories())
def test_the_level_never_falls_and_no_account_joins_below_it(history):
    accounts = [Account(1.0) for _ in range(6)]
    order: FairOrder[Account] = FairOrder()
    level = 0.0

    def check(name, account):
        nonlocal level
        assert order.level() >= level
        level = order.level()
        assert all(one.counter >= one.floor for one in accounts)

    play([one for one in history if one[0] != "credit"], accounts, order, check)


@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2, max_size=5),
    data=st.data(),
)
@settings(max_examples=60)
def test_backlogged_counters_stay_within_a_bound(weights, data):
    """The bound of the paper: the largest prompt plus all output that running requests may add."""
    max_prompt, max_output, max_running = 200, 50, 4
    accounts = [Account(weight) for weight in weights]
    order: FairOrder[Account] = FairOrder()
    for account in accounts:
        order.join(account)
    running: list[list] = []
    for _ in range(60):
        while len(running) < max_running:
            account = order.first()
            order.took_turn(account)
            order.charge(account, data.draw(st.integers(1, max_prompt)))
            running.append([account, data.draw(st.integers(1, max_output))])
        for one in running:
            order.charge(one[0], 1)
            one[1] -= 1
        running = [one for one in running if one[1]]
        bound = (max_prompt + max_running * max_output) / min(weights)
        counters = [account.counter for account in accounts]
        assert max(counters) - min(counters) <= bound


def test_idle_shares_do_not_accumulate_and_a_credit_stops_at_the_floor():
    order: FairOrder[Account] = FairOrder()
    busy, idle = Account(1.0), Account(1.0)
    order.join(busy)
    order.charge(busy, 500)
    order.join(idle)
    assert idle.counter == 500
    order.charge(idle, 30)
    order.credit(idle, 100)
    assert idle.counter == 500
    order.leave(busy)
    order.leave(idle)
    late = Account(1.0)
    order.join(late)
    assert late.counter == 500


@given(st.lists(st.integers(0, 5), max_size=400))
def test_the_heap_does_not_grow_with_joins_and_leaves(indices):
    accounts = [Account(1.0) for _ in range(6)]
    order: FairOrder[Account] = FairOrder()
    for index in indices:
        order.charge(accounts[index], 10)
        (order.leave if accounts[index].item is not None else order.join)(accounts[index])
    assert len(order._heap) <= 64 + 2 * 6 + 1


def test_idle_capacity_reduces_the_deficit_to_zero_at_least():
    deficit = BatchDeficit(0.2)
    deficit.owed = 100.0
    deficit.used_idle(60.0)
    assert deficit.owed == 40.0
    deficit.used_idle(60.0)
    assert deficit.owed == 0.0
    deficit.owed = -50.0
    deficit.used_idle(60.0)
    assert deficit.owed == -50.0


def test_a_batch_request_is_due_once_its_cost_is_owed():
    deficit = BatchDeficit(0.2)
    deficit.owed += 400 * deficit.per_token
    assert deficit.is_due(100)
    assert not deficit.is_due(101)
    deficit.restart()
    assert not deficit.is_due(1)
    deficit.owed -= 50
    deficit.restart()
    assert deficit.owed == -50


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.floats(0, 20, allow_nan=False)), min_size=1, max_size=60
    )
)
def test_a_rate_limit_is_kept_and_its_wait_is_right(requests):
    rate, burst, now, begun = 10.0, 100, 50.0, 50.0
    bucket = TokenBucket(rate, burst, now)
    admitted = 0
    for num_tokens, pause_s in requests:
        now += pause_s
        wait_s = bucket.wait_s(num_tokens, now)
        if wait_s:
            # Up to half a token may be missing, and sums of times are rounded.
            missing = 0.1 * wait_s * rate
            assert bucket.wait_s(num_tokens, now + 0.9 * wait_s) > 0 or missing <= 0.5 + 1e-9
            now += wait_s
            assert bucket.wait_s(num_tokens, now) == 0
        # A request larger than the burst makes the level negative, and the next one waits for it.
        assert admitted <= burst + rate * (now - begun) + 300
        bucket.take(num_tokens, now)
        admitted += num_tokens


def test_returned_tokens_can_be_used_at_once():
    bucket = TokenBucket(1.0, 100, 0.0)
    bucket.take(100, 0.0)
    assert bucket.wait_s(40, 0.0) == pytest.approx(40)
    bucket.give_back(60, 0.0)
    assert bucket.wait_s(40, 0.0) == 0
    assert not bucket.full(39.0)
    assert bucket.full(40.0)
