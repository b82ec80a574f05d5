"""Property tests of the autoscaler with arbitrary observations."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.coordinator.scaling.autoscale import queueing
from baton.coordinator.scaling.autoscale.autoscaler import decide
from baton.coordinator.scaling.autoscale.types import (
    DecodeLoad,
    LaneLoad,
    Observation,
    Phase,
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
POOLS = (Pool.PREFILL, Pool.DECODE)

limits = st.tuples(st.integers(0, 6), st.integers(0, 12)).map(
    lambda pair: PoolLimits(min(pair), max(max(pair), 1))
)
configs = st.builds(
    ScalingConfig,
    prefill=limits,
    decode=limits,
    max_gpus=st.one_of(st.none(), st.integers(2, 24)),
    cold_start_s=st.sampled_from([10.0, 60.0, 180.0]),
    down_window_s=st.sampled_from([None, 0.0, 60.0, 300.0]),
    max_up=st.sampled_from([1.0, 1.5, 4.0]),
    max_down=st.sampled_from([0.0, 0.25, 1.0]),
    start_timeout_s=st.sampled_from([30.0, 600.0]),
    flip=st.booleans(),
    targets=st.sampled_from(
        [(("interactive", Targets(ttft_s_per_1k_tokens=slope_s)),) for slope_s in (0.0, 1.0)]
    ),
)
numbers = st.one_of(
    st.floats(0, 1e6), st.sampled_from([math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
)
lane_loads = st.builds(
    LaneLoad,
    num_arrived=st.integers(0, 10**6),
    work_s=numbers,
    num_output_tokens=numbers,
    num_kv_tokens=numbers,
    works=st.lists(st.builds(Work, numbers, st.integers(0, 10**6)), max_size=4).map(tuple),
    queued_s=numbers,
    num_waiting=st.integers(0, 10**6),
    ttft_s=st.one_of(st.none(), numbers),
)
decode_loads = st.builds(
    DecodeLoad,
    num_decodes=st.integers(0, 10**6),
    reserved_tokens=st.integers(0, 10**9),
    kv_tokens=st.integers(0, 10**6),
    itl_s=st.one_of(st.none(), numbers),
)
views = st.lists(
    st.builds(
        WorkerView,
        st.just(""),
        st.sampled_from(POOLS),
        st.sampled_from(list(Phase)),
        st.floats(0, 5000),
        st.integers(0, 99),
        stays=st.booleans(),
    ),
    max_size=16,
).map(lambda found: tuple(replace(one, worker_id=f"w{n}") for n, one in enumerate(found)))
clocks = st.one_of(st.floats(0, 20), st.sampled_from([-500.0, 0.0, 5.0, 1e6]))


def is_stuck(view, now, config):
    """Whether a cold start has taken too long."""
    is_cold = view.phase is Phase.STARTING and not view.flips
    return is_cold and now - view.since > config.start_timeout_s


def serving(observation: Observation, pool: Pool) -> set[str]:
    return {one.worker_id for one in observation.of(pool, Phase.SERVING)}


@settings(max_examples=300, deadline=None)
@given(
    configs,
    st.lists(
        st.tuples(clocks, numbers, views, lane_loads, decode_loads, st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_never_outside_its_bounds_whatever_it_is_told(config, moments):
    state, now = State(), 1000.0
    for passed, age, workers, lane, decode, shared in moments:
        now = max(0.0, now + passed)
        lanes = ("interactive", lane), ("batch", LaneLoad())
        observation = Observation(now - age, workers, MODEL, lanes, decode, shared)
        decision, state = decide(observation, config, state, now)
        gpus = len(workers)
        for pool, one in zip(POOLS, (decision.prefill, decision.decode), strict=True):
            allowed = config.limits(pool)
            if one.target > one.current:
                assert one.target <= max(allowed.ceiling, allowed.floor)
                gpus += one.target - one.current
            if one.target < one.current:
                assert one.target >= min(allowed.floor, one.current)
            assert one.reason
        flips = [one for one in decision.actions if isinstance(one, Flip)]
        drains = [one for one in decision.actions if isinstance(one, Drain)]
        known = {one.worker_id: one for one in workers}
        for flip in flips:
            assert known[flip.worker_id].phase is Phase.SERVING
            assert known[flip.worker_id].pool is not flip.to
        named = [one.worker_id for one in (*flips, *drains)]
        assert len(named) == len(set(named))
        # Workers of other processes stay, unless their start is stuck.
        assert all(not known[one].stays or is_stuck(known[one], now, config) for one in named)
        # The number of leaving workers is the decrease of the pool; a growing pool loses none.
        for pool, one in zip(POOLS, (decision.prefill, decision.decode), strict=True):
            healthy = {
                view.worker_id
                for view in observation.workers
                if view.pool is pool
                and view.phase is not Phase.DRAINING
                and not is_stuck(view, now, config)
            }
            gone = {action.worker_id for action in (*flips, *drains)} & healthy
            assert len(gone) == max(0, one.current - one.target) or (
                flips and len(gone) >= one.current - one.target
            )
        # No worker leaves a pool that is at its minimum size.
        for pool in POOLS:
            gone = {one.worker_id for one in (*flips, *drains)} & serving(observation, pool)
            left = len(serving(observation, pool)) - len(gone)
            assert not gone or left >= min(
                config.limits(pool).floor - len(observation.of(pool, Phase.STARTING)),
                len(serving(observation, pool)),
            )
        if config.max_gpus is not None and any(
            isinstance(one, SetSize) for one in decision.actions
        ):
            assert gpus <= max(config.max_gpus, len(workers))
        if any(why in decision.prefill.reason for why in ("last heard of", "a measurement is")):
            # The observation cannot be used.
            assert not flips
            # Stuck starts are the exception.
            assert all(is_stuck(known[one.worker_id], now, config) for one in drains)


class Closed:
    """A constant load on pools that get the wanted size after a cold start."""

    def __init__(self, config, rate, work_s, output, num_prefill, num_decode, *, shared=False):
        self.config, self.rate, self.work_s, self.output = config, rate, work_s, output
        self.shared = shared
        self.now, self.state, self.names = 1000.0, State(), itertools.count()
        self.arrived = 0.0
        self.members = [self._new(Pool.PREFILL, Phase.SERVING) for _ in range(num_prefill)]
        self.members += [self._new(Pool.DECODE, Phase.SERVING) for _ in range(num_decode)]
        self.sizes: dict[Pool, list[int]] = {pool: [] for pool in POOLS}

    def _new(self, pool, phase):
        return WorkerView(f"w{next(self.names)}", pool, phase, self.now)

    def run(self, seconds):
        end = self.now + seconds
        while self.now < end:
            self.now += self.config.interval_s
            self.arrived += self.rate * self.config.interval_s
            self.members = [
                replace(one, phase=Phase.SERVING)
                if one.phase is Phase.STARTING and self.now - one.since >= self.config.cold_start_s
                else one
                for one in self.members
            ]
            decision, self.state = decide(self._seen(), self.config, self.state, self.now)
            self._obey(decision)
            for pool in POOLS:
                self.sizes[pool].append(sum(one.pool is pool for one in self.members))

    def _seen(self):
        lane = LaneLoad(
            num_arrived=round(self.arrived),
            work_s=self.arrived * self.work_s,
            num_output_tokens=self.arrived * self.output,
            num_kv_tokens=self.arrived * 1000,
            works=(Work(self.work_s),) * 8,
        )
        decoders = sum(
            (self.shared or one.pool is Pool.DECODE) and one.phase is Phase.SERVING
            for one in self.members
        )
        # Fluid model: number of requests at which workers generate tokens at the arrival rate.
        slope = MODEL.step_per_request_s + MODEL.step_per_kv_token_s * 1000
        each = self.rate * self.output / max(1, decoders)
        batch = each * MODEL.step_base_s / (1 - each * slope) if each * slope < 0.95 else 256.0
        number = round(batch * decoders)
        decode = DecodeLoad(number, 0, number * 1100, 400_000)
        lanes = (("interactive", lane),)
        return Observation(self.now, tuple(self.members), MODEL, lanes, decode, self.shared)

    def _obey(self, decision):
        leave = {one.worker_id for one in decision.actions if isinstance(one, Drain)}
        self.members = [one for one in self.members if one.worker_id not in leave]
        flips = {one.worker_id: one.to for one in decision.actions if isinstance(one, Flip)}
        self.members = [
            replace(one, pool=flips[one.worker_id]) if one.worker_id in flips else one
            for one in self.members
        ]
        for action in decision.actions:
            if isinstance(action, SetSize):
                number = sum(one.pool is action.pool for one in self.members)
                for _ in range(action.num_workers - number):
                    self.members.append(self._new(action.pool, Phase.STARTING))


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.2, 40),
    st.floats(0.01, 0.3),
    st.floats(1, 600),
    st.integers(1, 12),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
def test_never_oscillates_on_constant_load(
    rate, work_s, output, num_prefill, num_decode, flip, shared
):
    config = ScalingConfig(
        prefill=PoolLimits(1, 24), decode=PoolLimits(1, 24), flip=flip, cold_start_s=30.0
    )
    days = Closed(config, rate, work_s, output, num_prefill, num_decode, shared=shared)
    days.run(1500)
    for pool in POOLS:
        sizes = days.sizes[pool]
        moves = [after - before for before, after in itertools.pairwise(sizes) if after != before]
        turns = sum(one * other < 0 for one, other in itertools.pairwise(moves))
        assert turns <= 1, sizes
        # The sizes are constant long before the end.
        assert len(set(sizes[-60:])) == 1, sizes


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0.1, 50),
    st.floats(1, 3),
    st.floats(0.005, 0.4),
    st.floats(1, 800),
    st.floats(0, 50),
    st.integers(0, 500),
    st.integers(0, 20),
)
def test_more_load_never_means_fewer_workers(
    rate, factor, work_s, output, queued_s, decodes, waiting
):
    config = ScalingConfig(prefill=PoolLimits(0, 10**4), decode=PoolLimits(0, 10**4), max_up=1e4)

    def needed(scale):
        state, arrived, found = State(), 0.0, None
        for number in range(8):
            arrived += rate * scale * config.interval_s
            lane = LaneLoad(
                # Not rounded, because rounding would add changes to the constant load.
                num_arrived=arrived,
                work_s=arrived * work_s,
                num_output_tokens=arrived * output,
                num_kv_tokens=arrived * 1000,
                works=(Work(work_s), Work(work_s / 2)),
                queued_s=queued_s * scale,
                num_waiting=round(waiting * scale),
            )
            count = round(decodes * scale)
            observation = Observation(
                1000.0 + 5 * number,
                (WorkerView("p", Pool.PREFILL, Phase.SERVING, 0.0),),
                MODEL,
                (("interactive", lane),),
                DecodeLoad(count, 0, count * 1000, 200_000),
            )
            found, state = decide(observation, config, state, 1000.0 + 5 * number)
        return found.prefill.needed, found.decode.needed

    less, more = needed(1.0), needed(factor)
    assert more[0] >= less[0]
    assert more[1] >= less[1]


@settings(max_examples=200, deadline=None)
@given(
    st.floats(0.01, 60),
    st.floats(0, 5),
    st.lists(st.floats(0.001, 0.6), min_size=1, max_size=8),
    st.floats(0.05, 2),
)
def test_prefill_workers_grow_with_load_and_suffice(load, more, works, target_s):
    prompts, target = [Work(one) for one in works], TtftTarget(target_s)
    number = queueing.prefill_workers(load, prompts, target, 0.05)
    assert queueing.share_late(number, load, prompts, target) <= 0.05
    assert queueing.prefill_workers(load + more, prompts, target, 0.05) >= number
    assert queueing.prefill_workers(load, prompts, target.scaled(0.5), 0.05) >= number or any(
        one >= target_s / 2 for one in works
    )


@settings(max_examples=100, deadline=None)
@given(configs, st.lists(st.tuples(views, lane_loads, decode_loads), min_size=2, max_size=6))
def test_with_one_target_for_all_prompts_their_lengths_change_no_decision(config, moments):
    config = replace(config, targets=(("interactive", Targets()),))
    states = [State(), State()]
    for number, (workers, lane, decode) in enumerate(moments):
        now = 1000.0 + 5.0 * number
        bare = replace(lane, works=tuple(Work(one.work_s) for one in lane.works))
        decisions = []
        for index, load in enumerate((lane, bare)):
            observation = Observation(now, workers, MODEL, (("interactive", load),), decode)
            decision, states[index] = decide(observation, config, states[index], now)
            decisions.append(decision)
        assert decisions[0] == decisions[1]


def test_gaps_and_clock_jumps_cost_the_memory_and_shrink_nothing():
    config = ScalingConfig(prefill=PoolLimits(1, 16), decode=PoolLimits(1, 16), flip=False)
    days = Closed(config, 40, 0.1, 100, 6, 3)
    days.run(600)
    size = days.sizes[Pool.PREFILL][-1]
    for jump in (-400.0, 3600.0, 86400.0):
        days.now += jump
        days.rate = 0.1
        days.run(config.window_s - config.interval_s)
        assert days.sizes[Pool.PREFILL][-1] == size
        days.rate = 40
        days.run(600)
        size = days.sizes[Pool.PREFILL][-1]
        assert size >= 5
