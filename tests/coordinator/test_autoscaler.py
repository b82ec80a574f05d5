"""The autoscaler as a pure function: wanted sizes and their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.coordinator.scaling.autoscale import forecast, queueing
from baton.coordinator.scaling.autoscale.autoscaler import decide
from baton.coordinator.scaling.autoscale.prefill_need import prefill_need
from baton.coordinator.scaling.autoscale.types import (
    DecodeLoad,
    LaneLoad,
    Observation,
    PastNeed,
    Phase,
    Sample,
    State,
    WorkerView,
)
from baton.coordinator.state.demand import Work
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.coordinator.state.scaling_decision import Drain, Flip, SetSize
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.ttft_target import TtftTarget

MODEL = LatencyModel(0.01, 0.0001, 0.0, 0.015, 0.0003, 1e-7)
CONFIG = ScalingConfig(
    prefill=PoolLimits(1, 16), decode=PoolLimits(1, 16), cold_start_s=60.0, down_window_s=120.0
)


def workers(num_prefill, num_decode, phase=Phase.SERVING, since=0.0):
    return [WorkerView(f"p{n}", Pool.PREFILL, phase, since, n) for n in range(num_prefill)] + [
        WorkerView(f"d{n}", Pool.DECODE, phase, since, n) for n in range(num_decode)
    ]


class Days:
    """A continuing load and the decisions about it; wanted workers serve at once.

    Each decision comes `late_s` after its interval, as with real timers.
    """

    def __init__(
        self,
        config=CONFIG,
        num_prefill=1,
        num_decode=1,
        obeyed=True,
        model=MODEL,
        shared=False,
        late_s=0.0,
    ):
        self.model, self.shared, self.late_s = model, shared, late_s
        self.config, self.state, self.now, self.obeyed = config, State(), 1000.0, obeyed
        self.members = workers(num_prefill, num_decode)
        self.lane, self.decode = LaneLoad(), DecodeLoad(kv_tokens=200_000)
        self.decisions = []

    def size(self, pool):
        return sum(one.pool is pool for one in self.members)

    def passes(self, seconds, rate=0.0, work_s=0.1, output=200.0, heard_at=None, **changes):
        end = self.now + seconds
        while self.now < end:
            self.now += self.config.interval_s + self.late_s
            count = rate * self.config.interval_s
            self.lane = replace(
                self.lane,
                num_arrived=round(self.lane.num_arrived + count),
                work_s=self.lane.work_s + count * work_s,
                num_output_tokens=self.lane.num_output_tokens + count * output,
                num_kv_tokens=self.lane.num_kv_tokens + count * 1000.0,
                **{"works": (Work(work_s),) * 8, **changes},
            )
            observation = Observation(
                self.now if heard_at is None else heard_at,
                tuple(self.members),
                self.model,
                (("interactive", self.lane),),
                self.decode,
                self.shared,
            )
            decision, self.state = decide(observation, self.config, self.state, self.now)
            self.decisions.append(decision)
            if self.obeyed:
                self._obey(decision)
        return self.decisions[-1]

    def _obey(self, decision):
        for action in decision.actions:
            if isinstance(action, Drain):
                self.members = [one for one in self.members if one.worker_id != action.worker_id]
            elif isinstance(action, Flip):
                self.members = [
                    replace(one, pool=action.to) if one.worker_id == action.worker_id else one
                    for one in self.members
                ]
        for action in decision.actions:
            if isinstance(action, SetSize):
                for number in range(action.num_workers - self.size(action.pool)):
                    name = f"new-{self.now}-{action.pool.value}-{number}"
                    view = WorkerView(name, action.pool, Phase.SERVING, self.now)
                    self.members.append(view)


def test_more_workers_are_not_wanted_for_an_itl_target_that_none_keeps():
    """One request alone takes 62 ms per token."""
    slow = replace(MODEL, step_base_s=0.060, step_per_request_s=0.002)
    sizes = {}
    for name, itl_s in {"out of reach": 0.05, "none": None}.items():
        targets = (("interactive", Targets(0.5, itl_s)),)
        days = Days(config=replace(CONFIG, flip=False, targets=targets), model=slow)
        decision = days.passes(60, rate=1, work_s=0.01, output=300.0)
        sizes[name] = days.size(Pool.DECODE)
        if itl_s is not None:
            assert "none keeps 50 ms, as one request alone takes 62 ms" in decision.decode.reason
    assert sizes["none"] <= sizes["out of reach"] <= 2


def test_flips_do_not_exceed_the_most_workers_of_a_pool():
    """Workers that still start count, although flipped ones take their place."""
    config = replace(CONFIG, decode=PoolLimits(1, 4))
    days = Days(config=config, num_prefill=8, num_decode=2, obeyed=False)
    days.passes(120, rate=65)
    days.members += [WorkerView(f"c{n}", Pool.DECODE, Phase.STARTING, days.now) for n in range(2)]
    for _ in range(20):
        decision = days.passes(1, rate=10, work_s=0.01, output=1000.0)
        assert decision.decode.target <= 4


def test_prefill_grows_with_its_load_and_says_why():
    days = Days(config=replace(CONFIG, flip=False))
    decision = days.passes(60, rate=50)
    # The load is 5 s of prefill work per second.
    assert 6 <= days.size(Pool.PREFILL) <= 9
    assert "5.00 s of prompts per second" in decision.prefill.reason
    assert "500 ms" in decision.prefill.reason


def test_decode_grows_on_its_own():
    days = Days(config=replace(CONFIG, flip=False))
    # The load is 10,000 tokens/s; a worker generates about 2,200 tokens/s with steps of 45 ms.
    decision = days.passes(60, rate=10, work_s=0.01, output=1000.0)
    assert days.size(Pool.PREFILL) == 1
    assert 4 <= days.size(Pool.DECODE) <= 7
    assert "within 50 ms" in decision.decode.reason


def test_kv_room_limits_requests_per_worker():
    days = Days(config=replace(CONFIG, flip=False))
    days.decode = DecodeLoad(num_decodes=40, reserved_tokens=400_000, kv_tokens=100_000)
    decision = days.passes(20, rate=1, work_s=0.01)
    # A worker may use 90,000 KV tokens and a request needs 10,000, so a worker takes 9 requests.
    # A mean of 40 requests has a 95th percentile of 50.
    assert decision.decode.needed == 6
    assert "its KV cache" in decision.decode.reason


def test_max_num_seqs_limits_requests_per_worker():
    days = Days(config=replace(CONFIG, flip=False))
    days.decode = DecodeLoad(
        num_decodes=40, reserved_tokens=400_000, kv_tokens=10**7, most_requests=16
    )
    decision = days.passes(20, rate=1, work_s=0.01)
    # The 95th percentile of the number of requests is 50.
    assert decision.decode.needed == 4
    assert "a worker takes 16 at a time" in decision.decode.reason


def test_requests_in_prefill_count_before_they_decode():
    days = Days(config=replace(CONFIG, flip=False), obeyed=False)
    few = days.passes(10, rate=1, work_s=0.01)
    days.decode = DecodeLoad(
        num_decodes=300, num_in_prefill=290, reserved_tokens=300_000, kv_tokens=200_000
    )
    many = days.passes(5, rate=1, work_s=0.01)
    assert many.decode.needed > few.decode.needed
    assert "290 of them before their first token" in many.decode.reason


def test_work_that_has_piled_up_is_cleared():
    days = Days(config=replace(CONFIG, flip=False), obeyed=False)
    calm = days.passes(30, rate=5).prefill
    days.lane = replace(days.lane, queued_s=100.0)
    decision = days.passes(5, rate=5).prefill
    assert decision.needed >= calm.needed + 4
    assert "piled up" in decision.reason


def test_a_pool_shrinks_only_after_the_window_and_step_by_step():
    days = Days(config=replace(CONFIG, flip=False))
    days.passes(60, rate=50)
    before = days.size(Pool.PREFILL)
    decision = days.passes(90, rate=1)
    assert days.size(Pool.PREFILL) == before
    # The reason names the burst that keeps the workers.
    assert f"{before} were needed " in decision.prefill.reason
    ago_s = int(decision.prefill.reason.split(" were needed ")[1].split(" s ago")[0])
    assert 80 <= ago_s <= 100
    assert "(kept for 120 s)" in decision.prefill.reason
    sizes = []
    for _ in range(40):
        days.passes(5, rate=1)
        sizes.append(days.size(Pool.PREFILL))
    assert sizes[-1] == 1
    steps = [one - other for one, other in zip([before, *sizes], sizes, strict=False)]
    assert max(steps) <= before * CONFIG.max_down


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("interval_s", "down_window_s"), [(5.0, 0.0), (5.0, 3.0), (5.0, 5.0), (60.0, None)]
)
def test_a_pool_shrinks_though_decisions_are_further_apart_than_its_window(
    interval_s, down_window_s, shared
):
    config = replace(
        CONFIG, interval_s=interval_s, down_window_s=down_window_s, cold_start_s=10.0, flip=False
    )
    days = Days(config=config, num_prefill=8, late_s=0.001, shared=shared)
    days.passes(30 * interval_s, rate=0.2)
    assert (days.size(Pool.PREFILL), days.size(Pool.DECODE)) == (1, 1)


def test_a_worker_is_kept_for_several_cold_starts():
    for cold_start_s, kept_s in ((10.0, 60.0), (60.0, 300.0), (180.0, 900.0)):
        config = replace(CONFIG, flip=False, down_window_s=None, cold_start_s=cold_start_s)
        days = Days(config=config)
        days.passes(240, rate=50)
        before = days.size(Pool.PREFILL)
        assert before >= 6
        days.passes(kept_s, rate=1)
        assert days.size(Pool.PREFILL) == before
        days.passes(180, rate=1)
        assert days.size(Pool.PREFILL) < before


def test_a_stricter_percentile_takes_more_decode_workers():
    needed = []
    for percentile in (50.0, 80.0, 95.0, 99.5):
        config = replace(
            CONFIG, flip=False, targets=(("interactive", Targets(0.5, 0.05, percentile)),)
        )
        days = Days(config=config, obeyed=False)
        needed.append(days.passes(60, rate=10, work_s=0.01, output=1000.0).decode.needed)
    assert needed == sorted(needed)
    assert needed[0] < needed[-1]


def test_a_shrinking_pool_drains_the_least_loaded_worker():
    days = Days(config=replace(CONFIG, flip=False, down_window_s=5.0), num_prefill=4, obeyed=False)
    days.passes(30, rate=1)
    drained = [one for one in days.decisions[-1].actions if isinstance(one, Drain)]
    assert [one.worker_id for one in drained] == ["p0"]


def test_a_flip_comes_before_a_cold_start_and_does_not_come_back():
    days = Days(num_prefill=8, num_decode=2)
    days.passes(200, rate=1, work_s=0.01, output=100.0)
    # The window is long, so that the idle prefill pool does not shrink by draining.
    days = Days(num_prefill=8, num_decode=1, config=replace(CONFIG, down_window_s=1000.0))
    days.passes(510, rate=1, work_s=0.01, output=100.0)
    decision = days.passes(5, rate=20, work_s=0.01, output=1000.0)
    flips = [one for one in decision.actions if isinstance(one, Flip)]
    assert flips
    assert all(one.to is Pool.DECODE for one in flips)
    assert not any(isinstance(one, SetSize) and one.num_workers > 2 for one in decision.actions)
    # The load changes to prompts; the flipped workers do not return at once.
    days.passes(60, rate=60, work_s=0.1, output=1.0)
    later = [one for each in days.decisions[-12:] for one in each.actions if isinstance(one, Flip)]
    assert not any(one.to is Pool.PREFILL for one in later)


def test_pools_that_share_their_work_are_sized_together_and_swap_no_workers():
    days = Days(
        num_prefill=8, num_decode=1, config=replace(CONFIG, down_window_s=1000.0), shared=True
    )
    days.passes(510, rate=1, work_s=0.01, output=100.0)
    days.decisions.clear()
    # The decode pool alone is too small for the load; both pools together are large enough.
    decision = days.passes(60, rate=5, work_s=0.01, output=1000.0)
    assert decision.decode.needed > days.size(Pool.DECODE)
    assert not any(one.actions for one in days.decisions)
    assert "in both pools, which share their work" in decision.decode.reason
    # The pool that lacks most grows.
    decision = days.passes(300, rate=20, work_s=0.01, output=1000.0)
    needed = decision.prefill.needed + decision.decode.needed
    assert days.size(Pool.PREFILL) == 8
    assert days.size(Pool.PREFILL) + days.size(Pool.DECODE) >= needed > 9
    assert not any(isinstance(one, Flip) for each in days.decisions for one in each.actions)


def test_pools_that_share_their_work_shrink_after_the_window_to_the_need_of_both():
    days = Days(num_prefill=6, num_decode=6, shared=True)
    decision = days.passes(600, rate=10, work_s=0.1, output=200.0)
    assert (days.size(Pool.PREFILL), days.size(Pool.DECODE)) == (
        decision.prefill.needed,
        decision.decode.needed,
    )


def test_sizes_set_by_hand_swap_workers_of_pools_that_share_their_work():
    days = Days(num_prefill=4, num_decode=2, shared=True)
    days.passes(30, rate=1, work_s=0.01)
    assert not any(one.actions for one in days.decisions)
    days.config = replace(CONFIG, prefill=PoolLimits(2, 2), decode=PoolLimits(4, 4))
    decision = days.passes(10, rate=1, work_s=0.01)
    assert (days.size(Pool.PREFILL), days.size(Pool.DECODE)) == (2, 4)
    assert {type(one) for each in days.decisions for one in each.actions} == {Flip}
    assert decision.actions == ()


def test_pools_of_different_gpus_are_sized_on_their_own():
    config = replace(CONFIG, prefill=PoolLimits(1, 16, gpus=2))
    days = Days(config=config, num_prefill=1, num_decode=8, shared=True)
    days.passes(60, rate=50)
    assert days.size(Pool.PREFILL) >= 6


def test_a_worker_that_becomes_free_takes_the_place_of_one_that_still_starts():
    # The wanted workers are starting and do not serve yet.
    days = Days(num_prefill=4, num_decode=2, config=replace(CONFIG, down_window_s=60.0))
    days.passes(300, rate=28, work_s=0.1, output=100.0)
    days.members = [one for one in days.members if one.phase is Phase.SERVING]
    number = days.size(Pool.DECODE)
    days.members += [WorkerView(f"new{n}", Pool.DECODE, Phase.STARTING, days.now) for n in range(2)]
    days.decode = DecodeLoad(
        num_decodes=85 * (number + 2), reserved_tokens=85_000 * (number + 2), kv_tokens=200_000
    )
    prefill = days.size(Pool.PREFILL)
    found = []
    while not found and days.now < 1500:
        # The prompts become short, so prefill workers are no longer needed.
        decision = days.passes(5, rate=28, work_s=0.01, output=100.0)
        found = [one for one in decision.actions if isinstance(one, Flip)]
    assert found
    given_up = [one.worker_id for one in decision.actions if isinstance(one, Drain)]
    assert given_up
    assert set(given_up) <= {"new0", "new1"}
    assert len(given_up) <= len(found)
    assert days.size(Pool.PREFILL) == prefill - len(found)


def test_a_load_that_is_hardly_known_takes_no_worker_away():
    for down_window_s in (None, 90.0, 300.0):
        config = replace(CONFIG, down_window_s=down_window_s, cold_start_s=10.0)
        days = Days(num_prefill=4, num_decode=8, config=config)
        days.passes(min(120.0, config.window_s if down_window_s else 120.0), rate=2, work_s=0.01)
        assert (days.size(Pool.PREFILL), days.size(Pool.DECODE)) == (4, 8)
        days.passes(600, rate=2, work_s=0.01)
        assert (days.size(Pool.PREFILL), days.size(Pool.DECODE)) == (1, 1)


def test_a_load_that_is_hardly_known_takes_no_worker_away_that_others_have_added():
    """The workers were added by an operator or by another launcher."""
    days = Days(config=replace(CONFIG, flip=False))
    days.passes(30, rate=5)
    days.members += [WorkerView(f"by hand {n}", Pool.DECODE, Phase.SERVING, 0.0) for n in range(3)]
    days.passes(80, rate=5)
    assert days.size(Pool.DECODE) == 4
    days.passes(60, rate=5)
    assert days.size(Pool.DECODE) == 1


def test_starts_that_are_no_longer_wanted_are_given_up_and_workers_that_serve_are_kept():
    config = replace(CONFIG, flip=False, down_window_s=300.0)
    days = Days(config=config, num_prefill=4)
    days.passes(320, rate=28)
    serving = days.size(Pool.PREFILL)
    days.members.append(WorkerView("new", Pool.PREFILL, Phase.STARTING, days.now))
    history = (PastNeed(days.now, serving + 1),)
    days.state = replace(days.state, prefill=replace(days.state.prefill, need_history=history))
    days.passes(20, rate=28)
    assert days.size(Pool.PREFILL) == serving + 1
    days.passes(20, rate=28)
    assert days.size(Pool.PREFILL) == serving
    assert "new" not in {one.worker_id for one in days.members}
    days.passes(60, rate=1)
    assert days.size(Pool.PREFILL) == serving


def test_a_worker_that_does_not_respond_is_not_asked_to_flip():
    days = Days(num_prefill=8, num_decode=1, config=replace(CONFIG, down_window_s=1000.0))
    days.passes(510, rate=1, work_s=0.01, output=100.0)
    # The worker with the least load does not respond.
    days.members[0] = replace(days.members[0], responds=False)
    decision = days.passes(5, rate=20, work_s=0.01, output=1000.0)
    flips = [one.worker_id for one in decision.actions if isinstance(one, Flip)]
    assert flips
    assert "p0" not in flips


def test_pools_that_can_swap_workers_keep_the_most_that_both_needed_at_one_time():
    sizes = {}
    for flip in (True, False):
        days = Days(config=replace(CONFIG, flip=flip, down_window_s=600.0))
        # The load consists first of many prompts, then of long outputs.
        days.passes(150, rate=50, work_s=0.1, output=10.0)
        days.passes(200, rate=2, work_s=0.01, output=5000.0)
        sizes[flip] = days.size(Pool.PREFILL) + days.size(Pool.DECODE)
        assert days.size(Pool.DECODE) >= days.decisions[-1].decode.needed
    assert sizes[True] < sizes[False]


def test_a_young_rise_is_not_carried_far():
    def expected(seconds, lead_s):
        samples = tuple(
            Sample(1000.0 + at, 5.0, 20.0 + at / 3, 1.0, 1.0, 1.0)
            for at in range(5, seconds + 1, 5)
        )
        now = samples[-1].at
        factor = forecast.growth(samples, now, lead_s)
        return factor * forecast.load(samples, now, lambda one: one.rate) - samples[-1].rate

    # The damped trend adds at most half of the linear growth during the observed time.
    assert 0 < expected(60, 20.0) < expected(60, 600.0) < 60 / 3 / 2
    assert expected(120, 600.0) > expected(60, 600.0)


def test_a_shared_budget_waits_until_the_shrunk_pool_is_gone():
    config = replace(CONFIG, max_gpus=6, flip=False)
    days = Days(config=config, num_prefill=3, num_decode=3, obeyed=False)
    days.members[-1] = replace(days.members[-1], phase=Phase.DRAINING)
    decision = days.passes(30, rate=60)
    assert decision.prefill.target == 3
    assert "0 of 6 GPUs are free" in decision.prefill.reason
    assert decision.prefill.lacking_gpus > 0
    del days.members[-1]
    assert days.passes(5, rate=60).prefill.target == 4


def test_a_worker_stuck_in_starting_counts_no_more():
    config = replace(CONFIG, start_timeout_s=100.0, flip=False, down_window_s=30.0)
    days = Days(config=config, num_prefill=1, obeyed=False)
    days.members.append(WorkerView("stuck", Pool.PREFILL, Phase.STARTING, days.now))
    decision = days.passes(60, rate=10)
    assert decision.prefill.current == 2
    assert not any(isinstance(one, Drain) for one in decision.actions)
    decision = days.passes(60, rate=10)
    assert decision.prefill.current == 1
    assert [one.worker_id for one in decision.actions if isinstance(one, Drain)] == ["stuck"]
    assert SetSize(Pool.PREFILL, 2) in decision.actions


def test_an_idle_pool_shrinks_to_zero_and_grows_again():
    none = PoolLimits(0, 16)
    days = Days(config=replace(CONFIG, prefill=none, decode=none, idle_s=100.0))
    days.passes(60, rate=1, work_s=0.01)
    days.passes(90)
    assert days.size(Pool.PREFILL) == days.size(Pool.DECODE) == 1
    days.passes(300)
    assert days.size(Pool.PREFILL) == days.size(Pool.DECODE) == 0
    days.passes(5, rate=1, work_s=0.01)
    assert days.size(Pool.PREFILL) == days.size(Pool.DECODE) == 1


def test_the_last_worker_leaves_when_no_request_came_for_idle_s():
    """The load did not need the worker until then, so no further window follows."""
    none = PoolLimits(0, 16)
    for shared in (False, True):
        config = replace(CONFIG, prefill=none, decode=none, idle_s=300.0)
        days = Days(config=config, shared=shared)
        days.passes(60, rate=1, work_s=0.01)
        days.passes(290)
        assert days.size(Pool.PREFILL) + days.size(Pool.DECODE) > 0
        days.passes(20)
        assert days.size(Pool.PREFILL) + days.size(Pool.DECODE) == 0


def test_two_silent_minutes_after_a_burst_are_no_growth():
    """The trend is measured over one cold start, and the present load over two minutes."""
    days = Days(config=replace(CONFIG, cold_start_s=600.0))
    days.passes(840)
    days.passes(60, rate=50)
    for _ in range(40):
        days.passes(5)
    assert days.decisions[-1].prefill.needed >= 1


@pytest.mark.parametrize("shared", [False, True])
def test_outputs_of_lanes_without_targets_make_no_pool_grow(shared):
    """Batch outputs fill each new worker too, so the pool would grow to its largest size."""
    days = Days(num_prefill=2, num_decode=2, shared=shared)
    for _ in range(20):
        number = 250 * (4 if shared else days.size(Pool.DECODE))
        days.decode = DecodeLoad(number, 0, number * 500, 200_000, num_without_targets=number)
        days.passes(5)
    assert days.size(Pool.PREFILL) + days.size(Pool.DECODE) <= 4
    assert days.size(Pool.DECODE) >= 2
    # Nor do they hide the need of the others.
    days.decode = replace(days.decode, num_without_targets=50)
    days.passes(5)
    assert days.size(Pool.PREFILL) + days.size(Pool.DECODE) > 4


def test_all_workers_of_a_shared_cell_clear_the_backlog_of_prompts():
    growing = (("interactive", Targets(1.0, None, ttft_s_per_1k_tokens=1.0)),)
    needed = {}
    for num_prefill in (1, 7):
        days = Days(
            config=replace(CONFIG, targets=growing),
            num_prefill=num_prefill,
            num_decode=8 - num_prefill,
            shared=True,
            obeyed=False,
        )
        works = (Work(1.0, 9000),) * 8
        days.passes(30, rate=0.5, work_s=1.0, works=works)
        needed[num_prefill] = days.passes(
            5, rate=0.5, work_s=1.0, works=works, queued_s=40.0
        ).prefill.needed
    assert needed[1] == needed[7]


def test_requests_without_targets_keep_a_pool_from_shrinking_to_zero():
    """Even requests so short that none is present at the time of a decision."""
    none = PoolLimits(0, 16)
    targets = (("interactive", Targets(None, None)),)
    days = Days(config=replace(CONFIG, prefill=none, decode=none, idle_s=100.0, targets=targets))
    days.passes(600, rate=0.2, work_s=0.01)
    assert days.size(Pool.PREFILL) == days.size(Pool.DECODE) == 1
    days.passes(300)
    assert days.size(Pool.PREFILL) == days.size(Pool.DECODE) == 0


def test_a_missed_ttft_is_paid_for_with_workers():
    days = Days(config=replace(CONFIG, flip=False))
    predicted = days.passes(120, rate=10, work_s=0.1).prefill.needed
    days.passes(120, rate=10, work_s=0.1, num_first=50, num_late=20)
    assert days.decisions[-1].prefill.needed > predicted
    assert "since TTFT was missed" in days.decisions[-1].prefill.reason
    days.passes(600, rate=10, work_s=0.1, num_first=50, num_late=1)
    assert days.decisions[-1].prefill.needed == predicted


def test_long_prompts_are_late_by_their_own_target():
    """Half of the prompts have 20,000 tokens and take 2 s; the others take 20 ms."""
    short, long = Work(0.02, 100), Work(2.0, 20_000)
    needed = {}
    for slope_s in (0.0, 0.1, 1.0):
        targets = (("interactive", Targets(0.5, ttft_s_per_1k_tokens=slope_s)),)
        days = Days(config=replace(CONFIG, flip=False, targets=targets))
        decision = days.passes(120, rate=4, work_s=1.01, works=(short, long) * 4)
        needed[slope_s] = decision.prefill.needed
        assert ("500 ms + " in decision.prefill.reason) == bool(slope_s)
    # The load is 4.04 s per second. With 2.5 s for a long prompt, it may wait as long as a short
    # one; with 20.5 s, it may wait for as long as a backlog needs.
    assert needed[0.0] >= needed[0.1] > needed[1.0] >= 5


def test_a_long_prompt_counts_as_a_miss_where_its_target_could_be_met():
    """Prompts of 20,000 tokens take 0.6 s, more than the base target."""
    for slope_s, is_paid_for in ((0.0, False), (0.1, True)):
        targets = (("interactive", Targets(0.5, ttft_s_per_1k_tokens=slope_s)),)
        days = Days(config=replace(CONFIG, flip=False, targets=targets))
        works = (Work(0.6, 20_000),) * 8
        predicted = days.passes(120, rate=4, work_s=0.6, works=works).prefill.needed
        days.passes(120, rate=4, work_s=0.6, works=works, num_first=20, num_late=20)
        assert (days.decisions[-1].prefill.needed > predicted) == is_paid_for


def test_requests_without_work_worth_mentioning_are_never_late():
    """The square of such a number is 0."""
    works = [Work(1e-200), Work(0.0)]
    assert queueing.share_late(1, 0.5, works, TtftTarget(0.5)) == 0.0


def test_with_one_target_for_all_prompts_the_share_late_is_what_it_always_was():
    """The figures are those of the version before targets could grow with the prompt."""
    works, target = [Work(one, 9000) for one in (0.02, 0.3, 0.47, 0.7, 1.9)], TtftTarget(0.48)
    late = {number: queueing.share_late(number, 2.2, works, target, 1.4) for number in (3, 4, 6)}
    assert late == {3: 0.4425350447349254, 4: 0.15032812967908862, 6: 0.013555945264717302}
    assert queueing.prefill_workers(2.2, works, target, 0.05, 1.4) == 5


def test_misses_by_chance_are_not_paid_for():
    days = Days(config=replace(CONFIG, flip=False))
    predicted = days.passes(120, rate=10, work_s=0.1).prefill.needed
    # One of twelve requests is late; with so few requests, this is consistent with 5 %.
    for number in range(24):
        days.passes(5, rate=10, work_s=0.1, num_first=12, num_late=number % 2)
        assert days.decisions[-1].prefill.needed == predicted


def test_prompts_that_no_number_of_workers_would_help_are_not_paid_for():
    days = Days(config=replace(CONFIG, flip=False))
    predicted = days.passes(120, rate=4, work_s=0.6).prefill.needed
    days.passes(120, rate=4, work_s=0.6, num_first=20, num_late=20)
    assert days.decisions[-1].prefill.needed == predicted


def test_steps_longer_than_the_model_says_are_paid_for_with_workers():
    days = Days(config=replace(CONFIG, flip=False))
    predicted = days.passes(60, rate=10, work_s=0.01, output=1000.0).decode.needed
    days.decode = replace(days.decode, itl_s=0.04, itl_predicted_s=0.03)
    decision = days.passes(120, rate=10, work_s=0.01, output=1000.0).decode
    assert decision.needed > predicted
    assert "(ITL is 1.3" in decision.reason


def test_a_lane_without_targets_makes_no_pool_grow():
    days = Days(config=replace(CONFIG, targets=(("batch", Targets(None, None)),)))
    decision = days.passes(60, rate=50)
    assert (decision.prefill.target, decision.decode.target) == (1, 1)


def test_stale_measurements_freeze_the_pools_but_not_below_the_floor():
    days = Days(config=replace(CONFIG, prefill=PoolLimits(3, 16)), num_prefill=2, obeyed=False)
    old = Observation(900.0, tuple(days.members), MODEL)
    decision, _ = decide(old, days.config, State(now=995.0), 1000.0)
    assert decision.prefill.reason.endswith("last heard of 100 s ago: at least 3 all the same")
    assert decision.actions == (SetSize(Pool.PREFILL, 3),)


def test_arrivals_while_the_pools_are_frozen_do_not_count_as_a_burst():
    days = Days(config=replace(CONFIG, flip=False))
    usual = days.passes(300, rate=20).prefill.needed
    heard_at = days.now
    # The last report is up to 50 s old; observations older than 20 s are stale.
    days.passes(50, rate=20, heard_at=heard_at)
    assert "last heard of" in days.decisions[-1].prefill.reason
    after = days.passes(5, rate=20)
    assert "last heard of" not in after.prefill.reason
    assert after.prefill.needed == usual


def test_a_stuck_start_is_ended_while_the_pools_are_frozen():
    members = (*workers(1, 1), WorkerView("stuck", Pool.DECODE, Phase.STARTING, 300.0))
    old = Observation(900.0, members, MODEL)
    decision, _ = decide(old, CONFIG, State(now=995.0), 1000.0)
    assert "last heard of 100 s ago" in decision.prefill.reason
    assert [one.worker_id for one in decision.actions if isinstance(one, Drain)] == ["stuck"]


def test_targets_change_live():
    days = Days(config=replace(CONFIG, flip=False))
    loose = days.passes(60, rate=12, work_s=0.2).prefill.needed
    tight = replace(days.config, targets=(("interactive", Targets(0.3, 0.05)),))
    days.config = tight
    assert days.passes(5, rate=12, work_s=0.2).prefill.needed > loose


def test_a_backlog_beyond_all_measure_is_decided_on_at_once():
    lane = LaneLoad(num_arrived=10, work_s=1.0, works=(Work(0.1),) * 10, queued_s=1e12)
    observation = Observation(1000.0, (), MODEL, (("interactive", lane),))
    need = prefill_need(observation, ScalingConfig(), (), 1.0, 1, 1000.0)
    assert need.workers == queueing.MOST


def test_decisions_in_quick_succession_do_not_make_a_load_bursty():
    spans = [5.0, 0.5] * 20
    samples = tuple(
        Sample(1000.0 + sum(spans[: number + 1]), span_s, 20.0, 1.0, 1.0, 1.0)
        for number, span_s in enumerate(spans)
    )
    assert forecast.burstiness(samples) == 1.0
