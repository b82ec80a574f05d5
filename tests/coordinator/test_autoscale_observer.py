"""The autoscaler's observation of a running cell."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.coordinator.scaling.autoscale.numbers import numbers
from baton.coordinator.scaling.autoscale.types import Phase, WorkerView
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.demand import FirstToken
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig, Targets, scaling_config
from baton.runtime.config import parse
from baton.runtime.config_error import ConfigError
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape, hello

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
SHAPE = WorkerShape(MODEL, kv_tokens=100_000, noise=0.0)


def cell(
    tenants=None,
    kv_tokens=SHAPE.kv_tokens,
    max_num_seqs=SHAPE.max_num_seqs,
    *,
    local_prefill=False,
    elastic=False,
    **interactive,
) -> VirtualCell:
    values = {
        "model": "simulated",
        "elastic": elastic,
        "decode": {"local_prefill": local_prefill},
        "lanes": {"interactive": interactive},
        "tenants": tenants or {},
        "latency": {
            "prefill_base_ms": 5,
            "prefill_per_token_ms": 0.1,
            "prefill_per_token_squared_ms": 0,
        },
    }
    made = VirtualCell(CoreConfig.of(parse(values, "test")))
    made.add_worker("p", common_pb2.ROLE_PREFILL, SHAPE)
    shape = replace(SHAPE, kv_tokens=kv_tokens, max_num_seqs=max_num_seqs)
    made.add_worker("d", common_pb2.ROLE_DECODE, shape)
    return made


def lane(observation, name="interactive"):
    return dict(observation.lanes)[name]


def stable(made):
    """Revision of the stable fleet."""
    return made.core.workers.fleets.stable.name


def test_demand_is_counted_at_arrival():
    made = cell()
    observer = made.core.observer()
    for _ in range(10):
        made.submit(1000, 50)
    made.submit(1000, 50, lane=common_pb2.LANE_BATCH)
    seen = observer.observe(ScalingConfig(), made.now)
    # A prompt has 1,000 tokens and is computed in chunks of 512.
    assert lane(seen).num_arrived == 10
    assert lane(seen).work_s == pytest.approx(10 * 0.11)
    assert [one.work_s for one in lane(seen).works] == pytest.approx([0.11] * 10)
    assert lane(seen).queued_s + lane(seen, "batch").queued_s == pytest.approx(11 * 0.11)
    assert lane(seen).num_kv_tokens == 10 * (1000 + 25)
    assert lane(seen, "batch").num_arrived == 1
    assert seen.decode.num_decodes == seen.decode.num_in_prefill > 0


@pytest.mark.parametrize(
    "limits", [{"tenants": {"narrow": {"max_concurrent": 2}}}, {"max_running": 2}]
)
def test_requests_that_wait_for_a_limit_need_no_workers(limits):
    made = cell(**limits)
    observer = made.core.observer()
    for _ in range(30):
        made.submit(1000, 50, tenant="narrow")
    assert made.core.num_queued(common_pb2.LANE_INTERACTIVE) == 28
    load = lane(observer.observe(ScalingConfig(), made.now))
    assert load.num_waiting == 0
    assert load.queued_s == pytest.approx(2 * 0.11)
    made.run(made.now + 60)
    assert all(one.error is None for one in made.outcomes)
    load = lane(observer.observe(ScalingConfig(), made.now))
    assert (load.num_first, load.num_late) == (2, 0)


@pytest.mark.parametrize("is_full", [False, True])
def test_requests_that_wait_for_decode_room_are_no_misses_of_the_prefill_pool(is_full):
    """More prefill workers help requests that wait for their prompts, but not for room."""
    made = cell(kv_tokens=4_000 if is_full else 400_000)
    observer = made.core.observer()
    for _ in range(30):
        made.submit(1000, 200)
    made.run(made.now + 50)
    assert len(made.outcomes) == 30
    assert all(one.error is None for one in made.outcomes)
    load = lane(observer.observe(ScalingConfig(), made.now))
    if is_full:
        assert load.num_first < 6
        assert load.num_late == 0
    else:
        assert load.num_first == 30
        assert load.num_late > 20


def test_a_tenant_with_free_places_needs_workers_for_as_many_requests():
    made = cell({"narrow": {"max_concurrent": 4}})
    for worker in ("p", "d"):
        made.kill(worker)
    for _ in range(10):
        made.submit(1000, 50, tenant="narrow")
    load = lane(made.core.observer().observe(ScalingConfig(), made.now))
    assert load.num_waiting == 4
    assert load.queued_s == pytest.approx(4 * 0.105)


def test_cached_prefixes_are_no_demand():
    made = cell()
    prompt = list(range(1, 1001))
    made.submit(1000, 5, prompt=prompt)
    made.run(made.now + 5)
    before = lane(made.core.observer().observe(ScalingConfig(), made.now)).work_s
    made.submit(1000, 5, prompt=prompt)
    after = lane(made.core.observer().observe(ScalingConfig(), made.now)).work_s
    assert after - before < 0.02


def num_arrived(made):
    return lane(made.core.observer().observe(ScalingConfig(), made.now)).num_arrived


def test_a_refused_request_that_comes_again_is_demand_once():
    made, num_sheds = cell(max_queued=2), 0
    waiting = [[number, *[1] * 999] for number in range(20)]
    while waiting:
        # Each try has an ID of its own, as over HTTP.
        tries = [(prompt, made.submit(1000, 50, prompt=prompt)) for prompt in waiting]
        shed = [(prompt, one.error.retry_after_s) for prompt, one in tries if one.shed]
        num_sheds += len(shed)
        waiting = [prompt for prompt, _ in shed]
        made.run(made.now + max((after_s for _, after_s in shed), default=0.0))
    assert num_sheds > 20
    assert num_arrived(made) == 20


def test_a_refused_request_that_comes_again_much_later_is_demand_again():
    made = cell(max_queued=2)
    for _ in range(10):
        made.submit(1000, 50)
    assert made.submit(1000, 50, prompt=[1] * 1000).shed
    made.run(made.now + 300)
    made.submit(1000, 50, prompt=[1] * 1000)
    assert num_arrived(made) == 12


def test_equal_requests_are_demand_each():
    """Many clients send one prompt, as in a load test."""
    made = cell(max_queued=2)
    tries = [made.submit(1000, 50, prompt=[1] * 1000) for _ in range(20)]
    made.run(made.now + max(one.error.retry_after_s for one in tries if one.shed))
    for _ in range(20):
        made.submit(1000, 50, prompt=[1] * 1000)
    assert num_arrived(made) == 40


def test_requests_refused_for_overload_are_demand():
    made = cell(ttft_ms=300)
    outcomes = [made.submit(1000, 5) for _ in range(20)]
    assert sum(one.shed for one in outcomes) > 5
    assert lane(made.core.observer().observe(ScalingConfig(), made.now)).num_arrived == 20


def test_requests_over_a_tenants_limit_are_no_demand():
    """More workers would not admit a request over its tenant's limit."""
    made = cell(tenants={"reports": {"tokens_per_s": 100, "burst_tokens": 1100}})
    outcomes = [made.submit(1000, 50, tenant="reports") for _ in range(20)]
    assert sum(one.shed for one in outcomes) == 19
    assert lane(made.core.observer().observe(ScalingConfig(), made.now)).num_arrived == 1


def test_requests_waiting_for_the_first_prefill_worker_are_queued_work():
    made = cell()
    made.core.handle(ev.WorkerLost("p", "was killed"), made.now)
    for _ in range(10):
        made.submit(1000, 50)
    seen = lane(made.core.observer().observe(ScalingConfig(), made.now))
    assert seen.num_waiting == 10
    assert seen.queued_s == pytest.approx(seen.work_s)


@pytest.mark.parametrize("outgrown", [0, 2000])
def test_requests_waiting_for_kv_room_are_no_prefill_work(outgrown):
    """Also if outputs are longer than expected."""
    made = cell(kv_tokens=4000)
    for _ in range(10):
        made.submit(500, 500)
    made.run(made.now + 1)
    entry = made.core.placers.load(made.core.workers.by_id("d"))
    entry.report(entry.decodes.reserved_tokens + outgrown)
    assert (entry.free_tokens < 0) == (outgrown > 0)
    seen = lane(made.core.observer().observe(ScalingConfig(), made.now))
    assert seen.num_waiting > 0
    assert seen.queued_s == 0


@pytest.mark.parametrize("waits_for", ["prefill", "decode"])
def test_requests_that_wait_for_prefill_workers_need_no_decode_workers_yet(waits_for):
    made = cell(kv_tokens=400_000 if waits_for == "prefill" else 4000)
    for _ in range(20):
        made.submit(2000, 300)
    made.run(made.now + 1)
    seen = lane(made.core.observer().observe(ScalingConfig(), made.now))
    assert seen.num_waiting > 10
    assert seen.num_before_decode == (0 if waits_for == "prefill" else seen.num_waiting)


def test_requests_waiting_for_max_num_seqs_are_no_prefill_work():
    made = cell(max_num_seqs=4)
    for _ in range(10):
        made.submit(500, 500)
    made.run(made.now + 1)
    seen = made.core.observer().observe(ScalingConfig(), made.now)
    assert seen.decode.most_requests == seen.decode.num_decodes == 4
    assert lane(seen).num_waiting == 6
    assert lane(seen).queued_s == 0


def test_latencies_are_measured_since_the_last_look():
    made = cell()
    observer = made.core.observer()
    outcomes = [made.submit(1000, 50) for _ in range(20)]
    made.run(made.now + 1.2)
    seen = observer.observe(ScalingConfig(), made.now)
    known = sorted(one.ttft_s for one in outcomes if one.token_times)
    assert known[0] < lane(seen).ttft_s <= known[-1]
    assert seen.decode.itl_s == pytest.approx(0.0105, abs=0.002)
    late = sum(one > 0.5 for one in known)
    assert (lane(seen).num_first, lane(seen).num_late) == (len(known), late)
    assert 0 < late < len(known)
    assert lane(observer.observe(ScalingConfig(), made.now)).ttft_s is None


@pytest.mark.parametrize("order", [(PREFILL, DECODE), (DECODE, PREFILL)])
def test_the_decode_pool_is_sized_by_its_own_workers_steps(new_world, order):
    """Whichever pool's workers attach first; also while there is no decode worker."""
    models = {PREFILL: replace(MODEL, step_base_s=0.3), DECODE: MODEL}
    world = new_world()
    for role in order:
        name = common_pb2.Role.Name(role)
        world.attach(name, role, device=name)
    observer = world.core.observer()
    for worker in world.core.workers:
        steps = [
            cluster_pb2.StepSample(
                num_decodes=batch,
                num_kv_tokens=300 * batch,
                duration_us=round(models[worker.role].decode_step_s(batch, 300 * batch) * 1e6),
            )
            for batch in [1, 5, 20, 60] * 50
        ]
        world.core.latency.observe(worker, steps)
    expected = MODEL.decode_step_s(8, 2400)
    found = observer.observe(ScalingConfig(), world.now).latency
    assert found.decode_step_s(8, 2400) == pytest.approx(expected, rel=0.05)
    world.handle(ev.WorkerLost(common_pb2.Role.Name(DECODE), "was killed"))
    found = observer.observe(ScalingConfig(), world.now).latency
    assert found.decode_step_s(8, 2400) == pytest.approx(expected, rel=0.05)


def test_an_elastic_cell_counts_outputs_on_all_workers():
    """An output often stays on the worker that has computed its prompt, of either pool."""
    made = cell(elastic=True)
    observer = made.core.observer()
    for _ in range(6):
        made.submit(100, 400)
    made.run(made.now + 1)
    loads = [made.core.placers.load(one) for one in made.core.workers]
    assert sum(one.num_decodes for one in loads) == 6
    assert made.core.placers.load(made.core.workers.by_id("p")).num_decodes
    seen = observer.observe(ScalingConfig(), made.now)
    assert seen.decode.num_decodes == 6
    assert seen.decode.itl_s is not None
    # Their KV cache is a share of that of both workers.
    seen_share = numbers(seen, None, 0.0, Pool.DECODE, ScalingConfig())["kv_reserved_share"]
    assert seen_share == pytest.approx(seen.decode.reserved_tokens / 2 / SHAPE.kv_tokens)


def test_the_pools_share_their_work_in_an_elastic_cell_of_workers_of_one_kind():
    def shared(made):
        made.run(made.now + 0.1)
        return made.core.observer().observe(ScalingConfig(), made.now).shared

    assert not shared(cell(elastic=False))
    made = cell(elastic=True)
    assert shared(made)
    other = hello(("other", 1), DECODE, SHAPE, SHAPE.kv_tokens)
    other.device = "another device"
    made.post(ev.WorkerAttached(other))
    assert not shared(made)


@given(
    st.lists(st.tuples(st.floats(1e-6, 1e4), st.integers(0, 10**6)), min_size=1, max_size=40),
    st.floats(1e-3, 100),
    st.floats(1, 99),
)
def test_one_target_for_all_prompts_gives_the_percentile_of_ttft(firsts, target_s, percentile):
    made = cell()
    stats = made.core.stats.demand[common_pb2.LANE_INTERACTIVE]
    stats.first_tokens.extend(FirstToken(*one, stable(made)) for one in firsts)
    config = ScalingConfig(targets=(("interactive", Targets(target_s, percentile=percentile)),))
    seen = lane(made.core.observer().observe(config, made.now))
    ordered = sorted(ttft_s for ttft_s, _ in firsts)
    assert seen.ttft_s == ordered[math.ceil(percentile / 100 * len(ordered)) - 1]
    assert seen.ttft_target_s == target_s
    assert seen.num_late == sum(ttft_s > target_s for ttft_s in ordered)


def test_a_target_that_grows_ranks_requests_by_the_share_of_their_own_target():
    """The long prompt took 5 s of its 10.5 s, the short one 0.4 s of its 0.6 s."""
    made = cell()
    stats = made.core.stats.demand[common_pb2.LANE_INTERACTIVE]
    stats.first_tokens.extend(FirstToken(*one, stable(made)) for one in [(5.0, 10_000), (0.4, 100)])
    config = ScalingConfig(targets=(("interactive", Targets(0.5, ttft_s_per_1k_tokens=1.0)),))
    seen = lane(made.core.observer().observe(config, made.now))
    assert (seen.ttft_s, seen.ttft_target_s, seen.num_late) == (0.4, 0.6, 0)
    stats.first_tokens.append(FirstToken(10.6, 10_000, stable(made)))
    seen = lane(made.core.observer().observe(config, made.now))
    assert (seen.ttft_s, seen.ttft_target_s, seen.num_late) == (10.6, 10.5, 1)


def test_the_predicted_itl_includes_prompts_in_the_same_step():
    """Such gaps need no further decode workers, which would compute even more prompts."""
    made = cell(local_prefill=True)
    observer = made.core.observer()
    config = ScalingConfig(targets=(("interactive", Targets(0.5, 0.05, 99.0)),))
    for _ in range(5):
        made.submit(20, 400)
    made.run(made.now + 0.5)
    gaps = []
    for _ in range(12):
        for _ in range(8):
            made.submit(450, 2)
        made.run(made.now + 0.25)
        decode = observer.observe(config, made.now).decode
        gaps.append((decode.itl_s, decode.itl_predicted_s))
    assert max(measured for measured, _ in gaps) > 0.05
    for measured, predicted in gaps:
        assert predicted == pytest.approx(measured, rel=0.05)


def test_workers_are_seen_with_their_phases():
    made = cell()
    starting = WorkerView("new", Pool.DECODE, Phase.STARTING, made.now)
    seen = made.core.observer().observe(ScalingConfig(), made.now, [starting])
    assert [one.worker_id for one in seen.of(Pool.PREFILL, Phase.SERVING)] == ["p"]
    assert seen.of(Pool.DECODE, Phase.STARTING) == [starting]
    assert seen.observed_at == made.now
    assert seen.decode.kv_tokens == 100_000
    assert all(one.responds for one in seen.workers if one.phase is Phase.SERVING)


def test_an_unresponsive_worker_still_counts_as_serving():
    made = cell()
    made.core.workers.by_id("d").unresponsive = "was silent for 2 s"
    (seen,) = made.core.observer().observe(ScalingConfig(), made.now).of(Pool.DECODE, Phase.SERVING)
    assert not seen.responds


def test_targets_and_limits_come_from_the_configuration():
    config = parse(
        {
            "engine_args": {"tensor_parallel_size": 4},
            "scaling": {
                "targets": {"interactive": {"ttft_ms": 300}, "batch": {"ttft_ms": 60000}},
                "decode": {"min_workers": 2, "max_workers": 5},
            },
        },
        "test",
    )
    found = scaling_config(config)
    assert dict(found.targets)["interactive"] == Targets(0.3, 0.05, 95.0)
    assert dict(found.targets)["batch"] == Targets(60.0, None, 95.0)
    assert (found.decode.floor, found.decode.ceiling, found.decode.gpus) == (2, 5, 4)
    with pytest.raises(ConfigError, match="min_workers is 3; must be at most max_workers, 2"):
        parse({"scaling": {"prefill": {"min_workers": 3, "max_workers": 2}}}, "test")
