"""Floods and overload, under the virtual clock: the core with simulated workers.

Four prefill and four decode workers. A prompt token takes 0.1 ms and a step 5 ms more, so that a
prefill worker computes some 8,000 tokens/s in chunks of 256.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from virtual_cell import Outcome, VirtualCell, WorkerShape

from baton.coordinator.core.core import Core
from baton.coordinator.state.config import CoreConfig
from baton.runtime.config import LanesConfig, parse
from baton.runtime.latency import LatencyModel
from baton.v1 import common_pb2

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
SHAPE = WorkerShape(MODEL, kv_tokens=200_000, max_num_seqs=128, max_num_batched_tokens=256)
# Requests/s of 1,000 prompt tokens on average that the prefill workers can take.
CAPACITY = 32.0
WARM_UP_S, LASTS_S = 8.0, 16.0
# Where a percentile, or a small share, is compared.
LONG_S = 32.0


def cell(
    *, num_pairs=4, shape=SHAPE, local_prefill=False, batch=None, tenants=None, **interactive
) -> VirtualCell:
    free = {"max_queued": 10**6, "max_queue_s": 3600}
    values = {
        "model": "simulated",
        "coordinator": {"max_running_requests": 10**6},
        "decode": {"local_prefill": local_prefill},
        "tenants": tenants or {},
        "lanes": {"interactive": free | interactive, "batch": free | (batch or {})},
    }
    config = CoreConfig.of(parse(values, "test"))
    made = VirtualCell(config)
    for index in range(num_pairs):
        made.add_worker(f"p{index}", common_pb2.ROLE_PREFILL, shape)
        made.add_worker(f"d{index}", common_pb2.ROLE_DECODE, shape)
    return made


def offer(
    made: VirtualCell,
    rate: float,
    output: tuple[int, int],
    lane: int = INTERACTIVE,
    lasts_s: float = LASTS_S,
) -> tuple[float, float]:
    """Poisson arrivals; returns the time that counts."""
    begin, end = made.now + WARM_UP_S, made.now + WARM_UP_S + lasts_s
    made.poisson(
        rate,
        made.now,
        end,
        lambda: made.submit(
            made.random.randint(200, 1800), made.random.randint(*output), lane=lane
        ),
    )
    return begin, end


def percentile(values: list[float], percent: float) -> float:
    return sorted(values)[min(len(values) - 1, int(percent / 100 * len(values)))]


class Flood:
    """Interactive load at 30 % of capacity, a batch flood of three times capacity, or both."""

    def __init__(self, *, interactive: bool, flood: bool) -> None:
        made = cell(itl_ms=16)
        if interactive:
            begin, end = offer(made, 0.3 * CAPACITY, (50, 150), lasts_s=LONG_S)
        if flood:
            begin, end = offer(made, 3 * CAPACITY, (20, 80), BATCH, LONG_S)
        made.run(end)
        self.cell = made
        self.answered = [
            one
            for one in made.outcomes
            if one.lane == INTERACTIVE and one.arrived_at >= begin and one.token_times
        ]
        self.batch_tokens = self._tokens(begin, BATCH)
        self.tokens = self.batch_tokens + self._tokens(begin, INTERACTIVE)

    def _tokens(self, begin: float, lane: int) -> int:
        """Computed and generated since then."""
        return sum(
            sum(at >= begin for at in one.token_times)
            + (one.num_prompt_tokens if one.token_times and one.token_times[0] >= begin else 0)
            for one in self.cell.outcomes
            if one.lane == lane
        )

    def ttft_p99_s(self) -> float:
        return percentile([one.ttft_s for one in self.answered], 99)

    def itl_p99_s(self) -> float:
        return percentile([gap for one in self.answered for gap in one.gaps_s], 99)


def test_a_batch_flood_is_not_felt_by_interactive_load():
    alone = Flood(interactive=True, flood=False)
    flood = Flood(interactive=False, flood=True)
    both = Flood(interactive=True, flood=True)
    assert min(len(both.answered), len(alone.answered)) > 250
    # 1.25 times is what real processes are to reach, which add noise of their own.
    assert both.ttft_p99_s() <= 1.15 * alone.ttft_p99_s()
    assert both.itl_p99_s() <= 1.1 * alone.itl_p99_s()
    assert both.tokens >= 0.95 * flood.tokens
    assert both.batch_tokens >= 0.5 * flood.tokens
    both.cell.core.check_integrity()


def met(one: Outcome, ttft_s: float) -> bool:
    gaps = one.gaps_s
    return (
        one.error is None
        and len(one.token_times) == one.num_output_tokens
        and one.ttft_s <= ttft_s
        and sum(gaps) / max(1, len(gaps)) <= 0.05
    )


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        # Every message takes a third of a step, and steps are not what any model says.
        replace(SHAPE, delay_s=0.01, noise=0.3),
    ],
    ids=["as predicted", "slower than predicted"],
)
def test_overload_is_refused_and_costs_nobody_else(shape):
    goodput = {}
    for load in (1, 2):
        made = cell(shape=shape, itl_ms=50, ttft_ms=600)
        begin, end = offer(made, load * CAPACITY, (20, 60))
        made.run(end + 10)
        counted = [one for one in made.outcomes if begin <= one.arrived_at < end]
        admitted = [one for one in counted if not one.shed]
        good = [one for one in admitted if met(one, 0.6)]
        assert len(good) >= 0.99 * len(admitted)
        goodput[load] = len(good) / LASTS_S
        shed = [one for one in counted if one.shed]
        # Refused at once, with a time after which it is worth trying.
        assert all(one.ended_at == one.arrived_at for one in shed)
        assert all(0 < one.error.retry_after_s < 30 for one in shed)
        assert all(one.error.reason == "TOO_LATE" for one in shed)
        made.core.check_integrity()
    assert goodput[2] >= 0.95 * goodput[1]


def test_overload_of_the_decode_workers_is_refused_too():
    """Their KV caches take half of what comes; prefill workers have next to nothing to do."""
    made = cell(shape=replace(SHAPE, kv_tokens=20_000), ttft_ms=600)
    begin, end = made.now + 15, made.now + 15 + LASTS_S
    made.poisson(
        80,
        made.now,
        end,
        lambda: made.submit(made.random.randint(50, 150), made.random.randint(200, 400)),
    )
    made.run(end + 30)
    counted = [one for one in made.outcomes if begin <= one.arrived_at < end]
    admitted = [one for one in counted if not one.shed]
    assert 0.4 * len(counted) < len(admitted) < 0.6 * len(counted)
    assert sum(met(one, 0.6) for one in admitted) >= 0.99 * len(admitted)


def test_nobody_is_refused_for_what_another_tenant_has_waiting():
    made = cell(ttft_ms=600)
    begin, end = made.now + WARM_UP_S, made.now + WARM_UP_S + LONG_S
    for tenant, load in (("many", 3.0), ("few", 0.1)):
        made.poisson(
            load * CAPACITY,
            made.now,
            end,
            lambda tenant=tenant: made.submit(made.random.randint(200, 1800), 8, tenant=tenant),
        )
    made.run(end + 10)
    counted = [one for one in made.outcomes if begin <= one.arrived_at < end]
    few = [one for one in counted if one.tenant == "few"]
    assert len(few) > 80
    assert sum(met(one, 0.6) for one in few) >= 0.98 * len(few)
    many = [one for one in counted if one.tenant == "many" and not one.shed]
    assert sum(met(one, 0.6) for one in many) >= 0.99 * len(many)


@pytest.mark.parametrize(
    ("num_slots", "output", "ttft_ms"),
    [(2, (100, 100), 600), (2, (20, 200), 600), (4, (50, 100), 2000)],
)
def test_a_tenant_that_waits_for_its_own_requests_is_in_time_and_makes_nobody_late(
    num_slots, output, ttft_ms
):
    """It may have few at a time: most of its own are refused, and none of the others'."""
    made = cell(ttft_ms=ttft_ms, tenants={"narrow": {"max_concurrent": num_slots}})
    begin, end = made.now + WARM_UP_S, made.now + WARM_UP_S + LASTS_S
    for tenant in ("narrow", "wide"):
        made.poisson(
            0.5 * CAPACITY,
            made.now,
            end,
            lambda tenant=tenant: made.submit(
                made.random.randint(200, 1800), made.random.randint(*output), tenant=tenant
            ),
        )
    made.run(end + 10)
    counted = [one for one in made.outcomes if begin <= one.arrived_at < end]
    wide = [one for one in counted if one.tenant == "wide"]
    assert all(met(one, ttft_ms / 1e3) for one in wide)
    narrow = [one for one in counted if one.tenant == "narrow"]
    admitted = [one for one in narrow if not one.shed]
    assert sum(met(one, ttft_ms / 1e3) for one in admitted) >= 0.97 * len(admitted)
    assert len(admitted) < 0.3 * len(narrow)
    # Its places are hardly ever empty.
    ran_s = sum(one.ended_at - one.token_times[0] for one in admitted)
    assert ran_s > 0.75 * num_slots * LASTS_S
    made.core.check_integrity()


def test_long_prompts_follow_each_other_however_long_messages_take():
    """A worker that is sent for when its prompt is done stands still for two messages each time."""
    made = cell(shape=replace(SHAPE, delay_s=0.01))
    begin, end = offer(made, 2 * CAPACITY, (2, 4))
    made.run(end)
    num_tokens = sum(
        one.num_prompt_tokens
        for one in made.outcomes
        if one.token_times and begin <= one.token_times[0] < end
    )
    num_chunk_tokens = SHAPE.max_num_batched_tokens
    most = 4 * num_chunk_tokens / MODEL.prefill_s(num_chunk_tokens)
    assert num_tokens / (end - begin) > 0.95 * most


def test_no_more_than_two_steps_wait_behind_a_prompt_that_takes_longer_than_predicted():
    made = cell(num_pairs=1)
    made.run(made.now + 1)
    made.tell = lambda worker, event: None
    for _ in range(40):
        made.submit(300, 2)
    made.run(made.now + 3)
    load = made.core.placers.load(made.core.workers.get(("p0", 1)))
    assert load.queued_tokens <= 300 + 2 * SHAPE.max_num_batched_tokens + 300


def test_those_that_would_run_into_their_deadlines_are_refused():
    """Deadlines end them before a first token shows how late it is."""
    made = cell(shape=replace(SHAPE, delay_s=0.02))
    begin, end = made.now + WARM_UP_S, made.now + WARM_UP_S + LASTS_S
    made.poisson(
        2 * CAPACITY,
        made.now,
        end,
        lambda: made.submit(made.random.randint(200, 1800), 1, timeout_s=0.6),
    )
    made.run(end + 10)
    admitted = [one for one in made.outcomes if begin <= one.arrived_at < end and not one.shed]
    assert len(admitted) > 500
    assert sum(one.error is not None for one in admitted) <= 0.01 * len(admitted)
    assert made.core.wait_correction(INTERACTIVE) > 1


def test_what_an_incident_made_late_is_forgotten():
    """For a while no worker's message comes through, and those that wait are late."""
    made = cell(ttft_ms=600)
    offer(made, 1.2 * CAPACITY, (1, 1), lasts_s=LONG_S)
    made.run(made.now + 10)
    before = made.core.wait_correction(INTERACTIVE)
    tell, until = made.tell, made.now + 1.0
    made.tell = lambda worker, event: made.at(max(made.now, until), lambda: tell(worker, event))
    made.run(until + 2)
    assert made.core.wait_correction(INTERACTIVE) > before + 0.5
    made.run(until + 20)
    assert made.core.wait_correction(INTERACTIVE) < before + 0.2
    later = [one for one in made.outcomes if one.arrived_at > made.now - 8]
    assert sum(met(one, 0.6) for one in later) > 0.7 * len(later)


def test_what_cannot_be_in_time_is_refused_by_its_deadline_or_its_own_target():
    made = cell()
    for _ in range(40):
        made.submit(1800, 4, lane=BATCH)
    late = made.submit(1000, 4, lane=BATCH, timeout_s=0.2)
    assert late.shed
    wants = made.submit(1000, 4, slo_ttft_s=0.05)
    assert wants.shed
    patient = made.submit(1000, 4, slo_ttft_s=5.0)
    assert not patient.shed
    made.run(made.now + 60)
    assert patient.ttft_s <= 5.0
    assert not any(one.error for one in made.outcomes if one not in (late, wants))


@pytest.mark.parametrize("local_prefill", [True, False])
def test_a_short_prompt_does_not_wait_behind_long_ones(local_prefill):
    """Prefill workers are busy with long prompts; the decode workers have time."""
    made = cell(local_prefill=local_prefill)
    made.run(made.now + 1)
    for _ in range(4):
        made.submit(6000, 2)
    made.run(made.now + 0.02)
    short = made.submit(64, 8)
    made.run(made.now + 30)
    assert (short.ttft_s < 0.1) == local_prefill
    assert len(short.token_times) == 8


def test_neighbours_keep_their_itl_when_a_prompt_is_computed_beside_them():
    """Within 30 ms, but for a few gaps; and those of batch prompts never are longer."""
    made = cell(local_prefill=True, itl_ms=30)
    streams = [made.submit(100, 400) for _ in range(8)]
    made.run(made.now + 1)
    for _ in range(4):
        made.submit(6000, 2)
    made.run(made.now + 0.05)
    # Beside a step 64 tokens fit into 30 ms, 256 into 60, and 400 of the batch lane need not.
    short, longer, batch = made.submit(64, 4), made.submit(250, 4), made.submit(400, 4, lane=BATCH)
    made.run(made.now + 60)
    assert max(short.ttft_s, longer.ttft_s) < 0.1 < batch.ttft_s
    assert max(gap for one in streams for gap in one.gaps_s) < 0.06


def test_outputs_are_held_up_by_few_prompts_only():
    """However many come: each would make a step of 11 ms one of 42, which is to take 30."""
    made = cell(num_pairs=1, local_prefill=True, itl_ms=30)
    stream = made.submit(100, 600)
    made.run(made.now + 1)
    made.submit(6000, 2)
    prompts = []
    for _ in range(200):
        prompts.append(made.submit(256, 2))
        made.run(made.now + 0.03)
    made.run(made.now + 60)
    served_here = sum(one.ttft_s < 0.1 for one in prompts)
    assert served_here > 5
    late = [gap for gap in stream.gaps_s if gap > 0.03]
    assert served_here <= len(late) + 1
    assert 0 < len(late) <= 0.05 * len(stream.gaps_s) + 1
    assert max(late) < 0.06


def test_a_short_prompt_does_not_end_the_rest_that_a_long_one_is_followed_by():
    """1,024 tokens are four long steps, after which 76 are to follow; 64 tokens are none."""
    made = cell(num_pairs=1, local_prefill=True, itl_ms=30)
    stream = made.submit(100, 200)
    made.run(made.now + 1)
    made.submit(8000, 2)
    made.run(made.now + 0.01)
    first = made.submit(1024, 2)
    made.run(made.now + 0.2)
    short = made.submit(64, 2)
    made.run(made.now + 0.4)
    second = made.submit(1024, 2)
    made.run(made.now + 60)
    assert short.ttft_s < first.ttft_s < 0.25 < second.ttft_s
    late = [gap for gap in stream.gaps_s if gap > 0.03]
    assert len(late) <= 0.05 * len(stream.gaps_s)


def test_a_prompt_that_keeps_the_target_is_none_of_the_few():
    """64 tokens beside a step take less than 30 ms: 256 may follow at once, others later."""
    made = cell(num_pairs=1, local_prefill=True, itl_ms=30)
    stream = made.submit(100, 200)
    made.run(made.now + 1)
    made.submit(8000, 2)
    made.run(made.now + 0.01)
    prompts = []
    for num_tokens in (64, 256, 256):
        prompts.append(made.submit(num_tokens, 2))
        made.run(made.now + 0.06)
    made.run(made.now + 60)
    short, first, second = prompts
    assert max(short.ttft_s, first.ttft_s) < 0.1 < second.ttft_s
    assert sum(gap > 0.03 for gap in stream.gaps_s) <= 2


def test_a_recorded_run_replays_to_the_same_effects(monkeypatch):
    recorded: list[tuple[object, float, str]] = []
    handle = Core.handle

    def record(core, event, now):
        effects = handle(core, event, now)
        # As text: later events change messages that were handed out.
        recorded.append((copy.deepcopy(event), now, repr(effects)))
        return effects

    made = cell(local_prefill=True, itl_ms=12, ttft_ms=800)
    config = made.core._config
    monkeypatch.setattr(Core, "handle", record)
    made = VirtualCell(config, seed=7)
    for index in range(3):
        made.add_worker(f"p{index}", common_pb2.ROLE_PREFILL, SHAPE)
        made.add_worker(f"d{index}", common_pb2.ROLE_DECODE, SHAPE)
    offer(made, CAPACITY, (10, 40))
    offer(made, CAPACITY, (10, 80), BATCH)
    made.at(made.now + 2, lambda: made.kill("d1"))
    made.at(made.now + 3, lambda: made.kill("p1"))
    made.run(made.now + 6)
    monkeypatch.undo()
    assert made.core.stats.num_recoveries > 0
    assert made.core.stats.num_parked > 0
    again = VirtualCell(config, seed=7).core
    for event, now, effects in recorded:
        assert repr(again.handle(event, now)) == effects


def test_batch_outputs_make_room_and_come_back_whole():
    made = cell(itl_ms=12)
    batch = [made.submit(100, 400, lane=BATCH) for _ in range(120)]
    made.run(made.now + 2)
    people = [made.submit(100, 100) for _ in range(8)]
    made.run(made.now + 60)
    assert made.core.stats.num_parked > 0
    assert percentile([gap for one in people for gap in one.gaps_s], 90) < 0.0135
    for one in batch + people:
        assert one.error is None
        assert len(one.token_times) == one.num_output_tokens
    assert made.core.num_requests == 0
    made.core.check_integrity()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_long_batch_prompt_comes_through_beside_short_ones(prefix_caching):
    """It makes room only where what was computed of it stays; else it would begin ever again."""
    made = cell(num_pairs=1, shape=replace(SHAPE, prefix_caching=prefix_caching))
    made.run(made.now + 1)
    # 0.7 s of work.
    long = made.submit(6000, 2, lane=BATCH)
    shorts = []
    for _ in range(20):
        made.run(made.now + 0.2)
        shorts.append(made.submit(64, 2))
    made.run(made.now + 10)
    assert long.ttft_s < 1.2
    assert (made.core.stats.num_parked > 0) == prefix_caching
    assert (max(one.ttft_s for one in shorts) < 0.1) == prefix_caching


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_admission_knows_that_a_batch_prompt_makes_room(prefix_caching):
    made = cell(num_pairs=1, shape=replace(SHAPE, prefix_caching=prefix_caching))
    made.run(made.now + 1)
    made.submit(6000, 2, lane=BATCH)
    made.run(made.now + 0.05)
    urgent = made.submit(64, 2, slo_ttft_s=0.2)
    made.run(made.now + 10)
    assert urgent.shed == (not prefix_caching)
    assert urgent.shed or urgent.ttft_s <= 0.2


@pytest.mark.parametrize("num_pairs", [1, 4])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_batch_gets_its_share_of_prefill_workers_that_interactive_prompts_would_fill(
    share, num_pairs
):
    made = cell(num_pairs=num_pairs, batch={"share": share})
    capacity = CAPACITY * num_pairs / 4
    begin, end = offer(made, 2 * capacity, (20, 50), lasts_s=LONG_S)
    offer(made, capacity, (20, 50), BATCH, LONG_S)
    made.run(end)
    weights, served = LanesConfig(), {INTERACTIVE: 0.0, BATCH: 0.0}
    for one in made.outcomes:
        num_tokens = sum(at >= begin for at in one.token_times)
        served[one.lane] += num_tokens * weights.output_token_weight
        if one.token_times and one.token_times[0] >= begin:
            served[one.lane] += one.num_prompt_tokens * weights.prompt_token_weight
    # Of a few dozen prompts one is worth a percent.
    assert served[BATCH] / sum(served.values()) == pytest.approx(share, abs=0.02)
    # None was told to make room for those that it goes before by right.
    assert made.core.stats.num_parked <= 5


def test_a_long_prompt_that_is_kept_off_the_low_latency_path_makes_room_as_batch_does():
    """It was begun while nobody waited: short ones that come then do not wait for all of it."""
    config = CoreConfig.of(
        parse(
            {
                "model": "simulated",
                "decode": {"local_prefill": False},
                "lanes": {"long_prompt_tokens": 2000},
            },
            "test",
        )
    )
    made = VirtualCell(config)
    made.add_worker("p", common_pb2.ROLE_PREFILL, SHAPE)
    made.add_worker("d", common_pb2.ROLE_DECODE, SHAPE)
    made.run(made.now + 1)
    # 0.7 s of work.
    long = made.submit(6000, 20)
    shorts = []
    for _ in range(10):
        made.run(made.now + 0.15)
        shorts.append(made.submit(64, 2))
    made.run(made.now + 10)
    assert max(one.ttft_s for one in shorts) < 0.1
    assert long.ttft_s < 2.0
    assert len(long.token_times) == 20
    made.core.check_integrity()
