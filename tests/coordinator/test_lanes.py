"""Which request is next: no request is lost or skipped, and limits are kept."""

from __future__ import annotations

import itertools
import math
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from baton.coordinator.lanes import tenants as tenants_module
from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.state import events as ev
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.fleets import Fleets
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.requests import Request, StreamKey, Submission
from baton.runtime import errors
from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig, TenantConfig
from baton.v1 import common_pb2

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
STOP = common_pb2.FINISH_REASON_STOP


FLEET = Fleets("1").stable


def request(
    number: int, tenant: str = "a", lane: int = INTERACTIVE, num_prompt: int = 10, known=()
) -> Request:
    submission = Submission(
        to=StreamKey(1, number),
        request_id=f"r{number}",
        prompt_token_ids=[0] * num_prompt,
        sampling=common_pb2.SamplingParams(),
        lane=lane,
        arrived_at=float(number),
        tenant=tenant,
        known_token_ids=known,
    )
    return Request(submission, FLEET, float(number), 1e9, token_ids=array("I", known))


def dispatch(lanes: Lanes, limit: int = 10**6) -> list[str]:
    """Runs a round with room for `limit` requests; returns the ids of those dispatched."""
    taken: list[str] = []
    for one in lanes.candidates():
        if len(taken) == limit:
            continue
        one.attempt += 1
        lanes.dispatched(one, one.num_prompt_tokens + len(one.token_ids))
        taken.append(one.id)
    return taken


CONFIG = LanesConfig(
    interactive=InteractiveLaneConfig(max_running=6),
    batch=BatchLaneConfig(max_running=3, share=0.2),
    long_prompt_tokens=50,
)
TENANTS = {"narrow": TenantConfig(max_concurrent=2), "heavy": TenantConfig(weight=4)}


class LanesMachine(RuleBasedStateMachine):
    """Compares the lanes with plain lists of waiting and running requests."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = CoreClock()
        self.lanes = Lanes(self.clock, CONFIG, TenantConfig(), TENANTS)
        self.numbers = itertools.count()
        self.waiting: list[Request] = []
        self.running: list[Request] = []

    def ordered_in(self, one: Request) -> int:
        return BATCH if one.num_prompt_tokens > 50 else one.submission.lane

    def num_running(self, lane: int) -> int:
        return sum(self.ordered_in(one) == lane for one in self.running)

    def num_running_narrow(self) -> int:
        return sum(one.submission.tenant == "narrow" for one in self.running)

    def goes_first(self, one: Request) -> bool:
        has_run = one.attempt > 0 or one.is_resumed
        return one.submission.lane == INTERACTIVE and has_run and len(one.token_ids) > 0

    def can_run(self, one: Request) -> bool:
        if self.goes_first(one):
            return one.submission.tenant != "narrow" or self.num_running_narrow() < 4
        limit = {INTERACTIVE: 6, BATCH: 3}[self.ordered_in(one)]
        free = self.num_running(self.ordered_in(one)) < limit
        return free and (one.submission.tenant != "narrow" or self.num_running_narrow() < 2)

    @rule(
        tenant=st.sampled_from(["a", "b", "narrow", "heavy"]),
        lane=st.sampled_from([INTERACTIVE, BATCH]),
        num_prompt=st.sampled_from([1, 20, 50, 51, 80]),
        known=st.sampled_from([(), (), (7,)]),
        is_resumed=st.booleans(),
        growth_s=st.sampled_from([0.0, 0.0, 3.0, 20.0]),
    )
    def push(self, tenant, lane, num_prompt, known, is_resumed, growth_s):
        one = request(next(self.numbers), tenant, lane, num_prompt, known)
        one.growth_s, one.is_resumed = growth_s, is_resumed
        self.clock.now = one.submitted_at
        self.lanes.push(one)
        self.waiting.append(one)

    @rule(data=st.data())
    def round(self, data):
        passed: set[int] = set()
        unplaced: list[int] = []
        offered: set[str] = set()
        for one in self.lanes.candidates():
            lane = self.ordered_in(one)
            assert one in self.waiting
            assert self.can_run(one)
            assert one.id not in offered
            offered.add(one.id)
            first = [other for other in self.waiting if self.goes_first(other)]
            able = [
                other
                for other in first
                if self.can_run(other) and other.num_tokens < min(unplaced, default=math.inf)
            ]
            if able:
                assert one is min(able, key=lambda other: other.submission.arrived_at)
            else:
                assert lane not in passed
                assert one not in first
                self.assert_first_of_its_tenant(one)
            if data.draw(st.sampled_from([True, True, True, False])):
                one.attempt += 1
                self.waiting.remove(one)
                self.running.append(one)
                self.lanes.dispatched(one, one.num_prompt_tokens)
            elif one in first:
                # Requests that need no less are passed over.
                unplaced.append(one.num_tokens)
            else:
                passed.add(lane)
        # Every request that could have run was yielded.
        for one in self.waiting:
            if self.goes_first(one):
                is_passed = one.num_tokens >= min(unplaced, default=math.inf)
            else:
                is_passed = self.ordered_in(one) in passed
            assert is_passed or not self.can_run(one)

    def assert_first_of_its_tenant(self, one: Request) -> None:
        mine = [
            other
            for other in self.waiting
            if other.submission.tenant == one.submission.tenant
            and self.ordered_in(other) == self.ordered_in(one)
            and not self.goes_first(other)
        ]
        back = [other for other in mine if other.attempt or other.token_ids]
        if back:
            assert one is min(back, key=lambda other: other.submission.arrived_at)
        else:
            assert one is min(mine, key=lambda other: other.submitted_at + other.growth_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5))
    def serve(self, data, count):
        one = data.draw(st.sampled_from(self.running))
        one.token_ids.extend([0] * count)
        self.lanes.served(one, count)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cached(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.lanes.cached(one, one.num_prompt_tokens // 2)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def come_back(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.lanes.push(one)
        self.waiting.append(one)

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def end(self, data):
        one = data.draw(st.sampled_from(self.running + self.waiting))
        (self.running if one in self.running else self.waiting).remove(one)
        self.lanes.ended(one)
        self.lanes.ended(one)
        self.lanes.served(one, 1)

    @invariant()
    def counts_agree(self):
        self.lanes.check_integrity()
        assert len(self.lanes) == len(self.waiting)
        for lane in LANES:
            mine = [one for one in self.waiting if one.submission.lane == lane]
            assert self.lanes.num_queued(lane) == len(mine)
            assert (self.lanes.oldest(lane) in mine) == bool(mine)

    def teardown(self):
        for one in self.running + self.waiting:
            self.lanes.ended(one)
        self.lanes.check_integrity()
        assert len(self.lanes) == 0


def test_no_request_is_lost_or_yielded_twice_or_held_back():
    run_state_machine_as_test(
        LanesMachine, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


def test_tenants_take_turns_by_served_tokens():
    lanes = Lanes(CoreClock(), LanesConfig())
    for number in range(6):
        lanes.push(request(number, "long", num_prompt=100))
    for number in range(6, 18):
        lanes.push(request(number, "short", num_prompt=25))
    order = [int(one[1:]) >= 6 for one in dispatch(lanes, 10)]
    # Four short requests have the tokens of one long request.
    assert (order.count(False), order.count(True)) == (2, 8)


def test_a_tenant_at_its_limit_is_skipped_and_its_share_does_not_accumulate():
    lanes = Lanes(
        CoreClock(), LanesConfig(), TenantConfig(), {"narrow": TenantConfig(max_concurrent=1)}
    )
    mine = [request(number, "narrow") for number in range(3)]
    theirs = [request(number, "wide") for number in range(3, 40)]
    for one in mine + theirs:
        lanes.push(one)
    assert dispatch(lanes, 20) == ["r0", *(f"r{number}" for number in range(3, 22))]
    lanes.ended(mine[0])
    # It joins at the level of the other tenant, with one request.
    assert dispatch(lanes, 3) == ["r1", "r22", "r23"]


def test_a_long_prompt_lets_those_go_first_whose_first_token_is_due_sooner():
    """Its target is 2.5 s longer; requests with the same target keep the order of arrival."""
    clock = CoreClock()
    lanes = Lanes(clock, LanesConfig())
    long, *short = (request(number) for number in range(5))
    long.growth_s = 2.5
    for one in (long, *short):
        clock.now = one.submitted_at
        lanes.push(one)
    assert dispatch(lanes) == ["r1", "r2", "r0", "r3", "r4"]


def test_the_predicted_wait_leaves_out_what_a_short_prompt_overtakes():
    clock = CoreClock(7.0)
    lanes = Lanes(clock, LanesConfig())
    for number, growth_s in ((5, 0.5), (6, 0.0), (7, 0.0)):
        one = request(number)
        one.growth_s = growth_s
        lanes.push(one, work_s=1.0 + number)
    arrives = request(8).submission
    waits = [
        lanes.waits.turn_s(arrives, FLEET, growth_s, clock.now, 1.0, 1.0)
        for growth_s in (0.0, 0.5, 9.0)
    ]
    free = 1 / (1 - LanesConfig().batch.share)
    assert waits == pytest.approx([(7 + 8) * free, (6 + 7 + 8) * free, (6 + 7 + 8) * free])


def test_returned_requests_go_before_new_ones_ordered_by_arrival():
    lanes = Lanes(CoreClock(), LanesConfig())
    all_of_them = [request(number) for number in range(4)]
    for one in all_of_them:
        lanes.push(one)
    dispatch(lanes, 3)
    for number in (2, 0, 1):
        lanes.push(all_of_them[number])
    assert dispatch(lanes) == ["r0", "r1", "r2", "r3"]


def test_a_skipped_lane_leaves_its_turn_to_the_other_lane():
    lanes = Lanes(CoreClock(), LanesConfig())
    lanes.push(request(0, num_prompt=500))
    lanes.push(request(1))
    for number in (2, 3):
        lanes.push(request(number, lane=BATCH))
    taken = []
    for one in lanes.candidates():
        if one.num_prompt_tokens < 500:
            one.attempt += 1
            lanes.dispatched(one, 10)
            taken.append(one.id)
    assert taken == ["r2", "r3"]


def test_a_deferred_request_goes_behind_the_others_of_its_lane():
    lanes = Lanes(CoreClock(), LanesConfig())
    all_of_them = [request(0), request(1), request(2), request(3, "b", BATCH)]
    for one in all_of_them[:2]:
        lanes.push(one)
    order = []
    for one in lanes.candidates():
        order.append(one.id)
        if not one.is_late:
            lanes.defer(one)
        lanes.check_integrity()
    # The deferred ones are looked at once more in the round, until the first finds no place.
    assert order == ["r0", "r1", "r0"]
    for one in all_of_them[2:]:
        lanes.push(one)
    assert lanes.num_queued(INTERACTIVE) == 3
    assert dispatch(lanes) == ["r2", "r0", "r1", "r3"]
    lanes.check_integrity()
    # A late request that lost its worker does not wait behind the lane again.
    for one in (all_of_them[0], request(4)):
        lanes.push(one)
    assert not all_of_them[0].is_late
    assert dispatch(lanes) == ["r0", "r4"]
    lanes.check_integrity()


def test_long_interactive_prompts_are_ordered_in_the_batch_lane():
    lanes = Lanes(CoreClock(), LanesConfig(long_prompt_tokens=100))
    long = request(0, num_prompt=101)
    lanes.push(long)
    lanes.push(request(1, "b", BATCH))
    lanes.push(request(2, num_prompt=100))
    assert lanes.num_queued(INTERACTIVE) == 2
    assert lanes.oldest(INTERACTIVE) is long
    assert dispatch(lanes) == ["r2", "r0", "r1"]


def test_prompt_tokens_from_a_cache_are_not_charged():
    lanes = Lanes(CoreClock(), LanesConfig())
    hit, miss = request(0, "hit", num_prompt=100), request(1, "miss", num_prompt=100)
    for one in (hit, miss, *(request(number, "hit") for number in range(2, 8)), request(8, "miss")):
        lanes.push(one)
    dispatch(lanes, 2)
    lanes.cached(hit, 40)
    assert dispatch(lanes) == ["r2", "r3", "r4", "r5", "r8", "r6", "r7"]


def test_cached_prompt_tokens_are_given_back_once_for_all_attempts():
    """An attempt that follows a lost one is not charged for its prompt."""
    lanes = Lanes(CoreClock(), LanesConfig())
    hit, miss = request(0, "hit", num_prompt=100), request(1, "miss", num_prompt=100)
    for one in (hit, miss, *(request(number, "hit") for number in range(2, 8)), request(8, "miss")):
        lanes.push(one)
    dispatch(lanes, 2)
    lanes.cached(hit, 40)
    lanes.push(hit)
    assert next(lanes.candidates()) is hit
    lanes.dispatched(hit, 0)
    lanes.cached(hit, 40)
    assert dispatch(lanes) == ["r2", "r3", "r4", "r5", "r8", "r6", "r7"]


def test_idle_tenants_without_debt_are_forgotten(monkeypatch):
    """Otherwise, the third idle tenant would push out the one with a debt."""
    monkeypatch.setattr(tenants_module, "_MAX_IDLE", 2)
    rates = {"limited": TenantConfig(tokens_per_s=1.0, burst_tokens=100)}
    clock = CoreClock()
    lanes = Lanes(clock, LanesConfig(), TenantConfig(), rates)
    limited = request(0, "limited")
    lanes.push(limited, 100)
    dispatch(lanes)
    lanes.ended(limited)
    clock.now = 1.0
    for number in range(1, 10):
        lanes.push(request(number, f"t{number}"))
        lanes.ended(request(number, f"t{number}"))
        lanes.check_integrity()
        assert lanes.rate_error("limited", 100) is not None


def test_the_number_of_remembered_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(tenants_module, "_MAX_IDLE", 20)
    lanes = Lanes(CoreClock(), LanesConfig(), TenantConfig(tokens_per_s=1.0))
    for number in range(100):
        one = request(number, f"t{number}")
        lanes.push(one, 10)
        dispatch(lanes)
        lanes.ended(one)
    in_debt = [number for number in range(100) if lanes.rate_error(f"t{number}", 10)]
    assert len(in_debt) == 20
    lanes.check_integrity()


# ---- Through the core


def test_a_tenant_over_its_rate_is_told_when_to_retry(new_world, out):
    limited = TenantConfig(tokens_per_s=10.0, burst_tokens=100)
    world = new_world(tenants={"t": limited}).pair()
    first = world.submit(tenant="t", num_prompt=60, sampling={"max_tokens": 20})
    other = world.submit(tenant="u", num_prompt=60)
    refused = world.submit(tenant="t", num_prompt=40, sampling={"max_tokens": 20})
    assert world.kinds(first) == world.kinds(other) == ["Accepted"]
    error = world.last(refused).error
    assert (error.reason, error.retry_after_s) == ("TENANT_RATE", pytest.approx(4.0))
    assert "tenant 't' is over its 10 tokens/s" in str(error)
    assert world.core.stats.sheds == {"tenant_rate": 1}
    world.after(3.9)
    assert world.kinds(world.submit(tenant="t", num_prompt=40, sampling={"max_tokens": 20})) == [
        "Failed"
    ]
    world.after(0.1)
    again = world.submit(tenant="t", num_prompt=40, sampling={"max_tokens": 20})
    assert world.kinds(again) == ["Accepted"]


def test_batch_requests_leave_places_for_interactive_ones(new_world):
    """All requests that have not ended share one limit."""
    batch = BatchLaneConfig(max_queued=100, max_running=1)
    interactive = InteractiveLaneConfig(max_queued=4)
    lanes = LanesConfig(interactive=interactive, batch=batch)
    world = new_world(lanes=lanes, max_running_requests=10).pair()
    jobs = [world.submit(lane=BATCH) for _ in range(6)]
    assert all(world.kinds(to) == ["Accepted"] for to in jobs)
    error = world.last(world.submit(lane=BATCH)).error
    assert error.reason == "TOO_MANY_REQUESTS"
    limit = "(coordinator.max_running_requests)"
    assert str(error) == f"6 batch requests wait or run; at most 6 of 10 {limit}"
    people = [world.submit() for _ in range(4)]
    assert all(world.kinds(to) == ["Accepted"] for to in people)
    error = world.last(world.submit()).error
    assert error.reason == "TOO_MANY_REQUESTS"
    assert str(error) == f"10 requests wait or run; at most 10 {limit}"
    # A batch request that another one replaces leaves its place to it.
    world.handle(ev.StreamCancelled(people[0]))
    again = world.submit(2, lane=BATCH, request_id="r1", num_prompt=9, known_token_ids=(7,))
    assert world.kinds(again) == ["Accepted"]
    # Interactive requests may take all places.
    world = new_world(max_running_requests=4).pair()
    assert all(world.kinds(world.submit()) == ["Accepted"] for _ in range(4))


def test_a_request_that_is_resumed_in_another_lane_needs_a_place_there(new_world):
    lanes = LanesConfig(interactive=InteractiveLaneConfig(max_queued=2))
    world = new_world(lanes=lanes)
    people = [world.submit() for _ in range(2)]
    job = world.submit(lane=BATCH, request_id="job")
    resumed = {"request_id": "job", "known_token_ids": (7,)}
    again = world.submit(2, **resumed)
    assert world.last(again).error.reason == "QUEUE_FULL"
    # The request goes on in its own lane.
    assert world.kinds(job) == ["Accepted"]
    world.handle(ev.StreamCancelled(people[0]))
    assert world.kinds(world.submit(3, **resumed)) == ["Accepted"]
    assert world.kinds(job) == ["Accepted", "Failed"]


def test_a_request_that_is_resumed_in_another_lane_is_not_charged_twice(new_world):
    world = new_world(tenants={"a": TenantConfig(tokens_per_s=1, burst_tokens=30)})
    job = {"request_id": "job", "tenant": "a", "num_prompt": 20, "sampling": {"max_tokens": 5}}
    world.submit(lane=BATCH, **job)
    again = world.submit(2, known_token_ids=(7,), **job)
    assert world.kinds(again) == ["Accepted"]


def test_a_request_that_waits_too_long_is_told_which_limit_was_reached(new_world):
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(max_queue_s=5.0),
        batch=BatchLaneConfig(max_queue_s=5.0, max_running=1),
    )
    narrow = {"narrow": TenantConfig(max_concurrent=1)}
    world = new_world(lanes=lanes, tenants=narrow, max_prefill_requests=3).pair()
    of_tenant = [world.submit(tenant="narrow") for _ in range(2)][-1]
    of_lane = [world.submit(lane=BATCH) for _ in range(2)][-1]
    world.wait(6)
    for to, told in (
        (of_tenant, "tenant 'narrow' runs 1 request, at most 1 (max_concurrent): waited 5 s"),
        (of_lane, "the batch lane runs 1 request, at most 1 (lanes.batch.max_running): "),
    ):
        error = world.last(to).error
        assert (error.reason, str(error)[: len(told)]) == ("QUEUE_TIMEOUT", told)
    busy = [world.submit() for _ in range(4)][-1]
    world.wait(6)
    assert "every worker is busy: waited 5 s" in str(world.last(busy).error)


def test_a_tenant_that_fills_a_lane_does_not_keep_others_out(new_world):
    world = new_world(tenants={"narrow": TenantConfig(max_concurrent=1)}).pair()
    streams = [world.submit(tenant="narrow") for _ in range(9)]
    assert all(world.kinds(to) == ["Accepted"] for to in streams)
    error = world.last(world.submit(tenant="narrow")).error
    assert (error.reason, str(error)) == (
        "QUEUE_FULL",
        "8 requests wait in the interactive lane; at most 8",
    )
    other = world.submit(tenant="other")
    assert world.kinds(other) == ["Accepted"]
    assert world.core.request(f"r{other.stream}").prefill == ("p", 1)
    # Others that wait, too, get no more than their share.
    for worker in ("p", "d"):
        world.handle(ev.WorkerDetached((worker, 1)))
    waiting = [world.submit(tenant="other") for _ in range(5)]
    assert [world.kinds(to) for to in waiting] == [["Accepted"]] * 4 + [["Failed"]]
    assert (
        "12 requests wait in the interactive lane, 4 of them of tenant 'other'; at most 8"
        in str(world.last(waiting[-1]).error)
    )


def test_unused_tokens_return_to_the_rate_limit(new_world, out):
    world = new_world(tenant_defaults=TenantConfig(tokens_per_s=0.001, burst_tokens=100)).pair()
    world.submit(num_prompt=20, sampling={"max_tokens": 80})
    assert world.last(world.submit(num_prompt=1)).error.reason == "TENANT_RATE"
    world.step("p", out("r1", [7], finish=STOP))
    fits = world.submit(num_prompt=20, sampling={"max_tokens": 59})
    assert world.kinds(fits) == ["Accepted"]
    # A request that never ran returns all its tokens.
    world = new_world(tenant_defaults=TenantConfig(tokens_per_s=0.001, burst_tokens=100))
    waiting = world.submit(num_prompt=20, sampling={"max_tokens": 80})
    world.handle(ev.StreamCancelled(waiting))
    assert world.kinds(world.submit(num_prompt=20, sampling={"max_tokens": 80})) == ["Accepted"]


def test_each_lane_has_its_own_queue_timeout(new_world):
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(max_queue_s=5.0), batch=BatchLaneConfig(max_queue_s=15.0)
    )
    world = new_world(lanes=lanes)
    interactive, batch = world.submit(), world.submit(lane=BATCH)
    world.after(6.0)
    assert "waited 5 s" in str(world.last(interactive).error)
    assert world.kinds(batch) == ["Accepted"]
    world.after(10.0)
    assert "waited 15 s" in str(world.last(batch).error)


@pytest.mark.parametrize(
    ("num_output", "num_prompt", "num_cached", "expected"),
    [(1, 10, 0, "a/r2"), (30, 10, 0, "b/r5"), (30, 200, 0, "a/r2"), (30, 200, 190, "b/r5")],
)
def test_tokens_that_workers_report_decide_which_tenant_is_next(
    new_world, out, num_output, num_prompt, num_cached, expected
):
    """Tenant a's request decodes while b's prompt is computed; then either has its second turn."""
    world = new_world(max_prefill_requests=1).pair()
    world.submit(tenant="a", num_prompt=10)
    for tenant, num_tokens in (("a", 5), ("b", num_prompt), ("a", 5), ("b", 5)):
        world.submit(tenant=tenant, num_prompt=num_tokens)
    world.step("p", out("a/r1", [7], finish=0))
    assert world.commands["p"][-1].spec.request_id == "b/r3"
    world.step("d", out("a/r1", [7] * num_output, offset=1))
    world.step("p", out("b/r3", [7], finish=STOP, timings={"num_cached_tokens": num_cached}))
    assert world.commands["p"][-1].spec.request_id == expected


@pytest.fixture
def limited(new_world, out):
    """A request of 60 tokens and two output tokens, whose tenant has a burst of 70 tokens."""
    rate = TenantConfig(tokens_per_s=0.001, burst_tokens=70)
    recovery_timeout = dict.fromkeys(("worker_timeout_s", "worker_silent_s", "worker_stuck_s"), 1e6)
    world = new_world(tenant_defaults=rate, **recovery_timeout).pair()
    # Requests of an earlier coordinator are no longer expected.
    world.after(10.0)
    world.to = world.submit(num_prompt=20, sampling={"max_tokens": 40})
    world.step("p", out("r1", [7]))
    world.step("d", out("r1", [8], 1))
    return world


def resume(world, known=(7, 8), **changes):
    fields = {"request_id": "r1", "num_prompt": 20, "sampling": {"max_tokens": 40}, **changes}
    return world.submit(2, known_token_ids=known, **fields)


def test_an_accepted_request_may_be_resumed_over_its_tenants_rate_limit(limited):
    again = resume(limited)
    assert limited.kinds(again) == ["Accepted"]
    assert limited.kinds(limited.to)[-1] == "Failed"
    assert limited.last(limited.to).error.code == errors.Aborted("").code


def test_a_request_whose_session_was_lost_may_be_resumed_over_the_rate_limit(limited):
    limited.handle(ev.SessionLost(1))
    assert limited.kinds(resume(limited)) == ["Accepted"]
    limited.handle(ev.SessionLost(2))
    # More tokens than it had, or another request, do not count as resumed.
    assert limited.last(resume(limited, known=(7, 8, 9))).error.reason == "TENANT_RATE"
    assert limited.last(resume(limited, request_id="r9")).error.reason == "TENANT_RATE"


@pytest.fixture
def lost(new_world, out):
    """Factory of a core whose client lost the connection of requests r1 to r3, with a token each.

    Their tenant has no tokens left for a new request. The core remembers one request that ended in
    another way.
    """

    def make(**changes):
        rate = TenantConfig(tokens_per_s=0.001, burst_tokens=3 * 60)
        silent = dict.fromkeys(("worker_timeout_s", "worker_silent_s", "worker_stuck_s"), 1e6)
        world = new_world(tenant_defaults=rate, max_ended_requests=1, **silent, **changes).pair()
        # Requests of an earlier coordinator are no longer expected.
        world.after(10.0)
        streams = [world.submit(num_prompt=20, sampling={"max_tokens": 40}) for _ in range(3)]
        for to in streams:
            request = world.core.request(f"r{to.stream}")
            for worker in {*filter(None, (request.prefill, request.decode))}:
                world.step(worker[0], out(request.id, [7]))
        world.handle(ev.SessionLost(1))
        # Other requests that end must not displace them.
        for _ in range(3):
            world.handle(ev.StreamCancelled(world.submit(3, num_prompt=1, tenant="u")))
        return world

    return make


def test_all_requests_of_a_lost_session_may_be_resumed_over_the_rate_limit(lost):
    world = lost()
    streams = [resume(world, known=(7,), request_id=f"r{number}") for number in (3, 2, 1)]
    assert [world.kinds(to) for to in streams] == [["Accepted"]] * 3
    assert world.last(world.submit(num_prompt=20)).error.reason == "TENANT_RATE"


def test_late_tokens_from_before_a_lost_session_are_not_sent_to_the_resumed_request(lost, out):
    """The worker sent them before it read that the attempt is cancelled."""
    world = lost(elastic=True)
    to = resume(world, known=(7,), request_id="r1")
    world.step(world.core.request("r1").decode[0], out("r1", [99], 1, attempt=1))
    assert world.tokens(to) == []


OTHER_REQUESTS = [{"num_prompt": 21}, {"sampling": {"max_tokens": 39}}, {"adapter": "other"}]


@pytest.mark.parametrize("changes", OTHER_REQUESTS)
def test_a_different_request_under_the_id_of_a_lost_one_is_limited(limited, changes):
    limited.handle(ev.SessionLost(1))
    assert limited.last(resume(limited, **changes)).error.reason == "TENANT_RATE"
    assert limited.kinds(resume(limited)) == ["Accepted"]


@pytest.mark.parametrize("changes", OTHER_REQUESTS)
def test_a_different_request_under_the_id_of_a_running_one_is_limited(limited, out, changes):
    assert limited.last(resume(limited, **changes)).error.reason == "TENANT_RATE"
    limited.step("d", out("r1", [9], 2, finish=STOP))
    assert limited.tokens(limited.to) == [7, 8, 9]


@pytest.mark.parametrize("cancelled", [ev.StreamCancelled, ev.RequestCancelled])
def test_a_request_that_was_cancelled_may_not_be_resumed_over_the_rate_limit(limited, cancelled):
    key = limited.core.request("r1").key
    limited.handle(cancelled(limited.to if cancelled is ev.StreamCancelled else key))
    assert limited.last(limited.to).reason == common_pb2.FINISH_REASON_CANCELLED
    assert limited.last(resume(limited)).error.reason == "TENANT_RATE"


def test_a_restarted_coordinator_accepts_resumed_requests_over_the_rate_limit(new_world):
    world = new_world(tenant_defaults=TenantConfig(tokens_per_s=0.001, burst_tokens=100))
    streams = [resume(world, request_id=f"r{number}") for number in range(3)]
    assert [world.kinds(to) for to in streams] == [["Accepted"]] * 3
    assert world.last(world.submit(num_prompt=10)).error.reason == "TENANT_RATE"
    # This coordinator knows how these requests have ended.
    world.handle(ev.StreamCancelled(streams[0]))
    assert world.last(resume(world, request_id="r0")).error.reason == "TENANT_RATE"
    world.handle(ev.SessionLost(2))
    assert world.kinds(resume(world, request_id="r1")) == ["Accepted"]


def test_a_resumed_request_replaces_its_older_stream_at_the_request_limit(new_world, out):
    world = new_world(max_running_requests=1).pair()
    world.submit(num_prompt=20, sampling={"max_tokens": 40})
    world.step("p", out("r1", [7]))
    assert world.kinds(resume(world, known=(7,))) == ["Accepted"]
    assert world.last(world.submit()).error.reason == "TOO_MANY_REQUESTS"


def test_a_request_that_cannot_be_resumed_continues_unchanged(limited, out):
    limited.handle(ev.AdmissionClosed(restarts=True))
    assert limited.kinds(resume(limited)) == ["Failed"]
    limited.step("d", out("r1", [9], 2, finish=STOP))
    assert limited.tokens(limited.to) == [7, 8, 9]
    assert limited.kinds(limited.to)[-1] == "Finished"
