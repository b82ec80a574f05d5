"""Decode workers that are full of batch requests: preemption of these, under a virtual clock."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import RequestState
from baton.runtime.config import LaneTargetsConfig, TargetsConfig, parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.virtual_cell import Outcome, VirtualCell, WorkerShape

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
SHAPE = WorkerShape(MODEL, max_num_batched_tokens=256)
# KV room for about 25 batch requests per worker; the number of requests per step is no limit.
LITTLE_ROOM = replace(SHAPE, kv_tokens=16_000, max_num_seqs=256)
# The number of requests per step is the limit, and KV room is not.
FEW_SEATS = replace(SHAPE, kv_tokens=200_000, max_num_seqs=16)


def cell(shape: WorkerShape, *, num_pairs: int = 2, **interactive: object) -> VirtualCell:
    free = {"max_queued": 10**6, "max_queue_s": 3600}
    values = {
        "model": "simulated",
        "coordinator": {"max_running_requests": 10**6},
        "decode": {"local_prefill": False},
        "lanes": {"interactive": {**free, **interactive}, "batch": free},
    }
    made = VirtualCell(CoreConfig.of(parse(values, "test")))
    for index in range(num_pairs):
        made.add_worker(f"p{index}", common_pb2.ROLE_PREFILL, shape)
        made.add_worker(f"d{index}", common_pb2.ROLE_DECODE, shape)
    return made


class Flooded:
    """A low interactive load, with or without batch requests that fill every decode worker."""

    def __init__(self, shape: WorkerShape, *, interactive: bool, flood: bool, **lane) -> None:
        self.cell = made = cell(shape, **lane)
        begin, end = made.now + 15, made.now + 45
        if flood:
            made.poisson(8, made.now, end, lambda: made.submit(200, 400, lane=BATCH))
        if interactive:
            made.poisson(2, begin - 5, end, lambda: made.submit(400, 60))
        made.run(end)
        self.answered = [
            one
            for one in made.outcomes
            if one.lane == INTERACTIVE and begin <= one.arrived_at < end - 5
        ]
        self.num_tokens = sum(begin <= at < end for one in made.outcomes for at in one.token_times)
        made.core.check_integrity()

    def worst_ttft_s(self) -> float:
        assert all(one.token_times for one in self.answered)
        return max(one.ttft_s for one in self.answered)

    def worst_gap_s(self) -> float:
        return max(gap for one in self.answered for gap in one.gaps_s)


@pytest.mark.parametrize("shape", [LITTLE_ROOM, FEW_SEATS], ids=["kv", "seats"])
def test_batch_outputs_that_fill_every_worker_make_room(shape):
    alone = Flooded(shape, interactive=True, flood=False)
    flood = Flooded(shape, interactive=False, flood=True)
    both = Flooded(shape, interactive=True, flood=True)
    assert len(both.answered) > 30
    assert both.worst_ttft_s() < 2 * alone.worst_ttft_s()
    assert both.worst_gap_s() < 0.06
    assert both.num_tokens >= 0.95 * flood.num_tokens


def test_a_large_request_does_not_wait_for_small_ones_of_the_batch_lane():
    """Small requests would otherwise always take the room that another one frees."""
    made = cell(LITTLE_ROOM, num_pairs=1)
    made.poisson(8, made.now, made.now + 60, lambda: made.submit(200, 400, lane=BATCH))
    made.run(made.now + 15)
    large = made.submit(6000, 20)
    made.run(made.now + 30)
    assert large.token_times
    assert large.ttft_s < 1.5


def test_preempted_batch_outputs_are_completed():
    made = cell(LITTLE_ROOM, num_pairs=1)
    batch = [made.submit(200, 400, lane=BATCH) for _ in range(60)]
    made.run(made.now + 5)
    people = [made.submit(1500, 40) for _ in range(4)]
    made.run(made.now + 120)
    assert made.core.stats.num_parked > 0
    for one in batch + people:
        assert one.error is None
        assert len(one.token_times) == one.num_output_tokens
    made.core.check_integrity()


def test_batch_fills_workers_without_interactive_requests():
    """Interactive requests keep batch requests off their own workers, and off no others."""

    def num_tokens(num_people: int) -> int:
        made = cell(replace(SHAPE, kv_tokens=200_000, max_num_seqs=256), itl_ms=14)
        for _ in range(num_people):
            made.submit(100, 3000)
        made.run(made.now + 1)
        begin = made.now + 15
        made.poisson(40, made.now, begin + 10, lambda: made.submit(100, 1000, lane=BATCH))
        made.run(begin + 10)
        batch = [one for one in made.outcomes if one.lane == BATCH]
        return sum(at >= begin for one in batch for at in one.token_times)

    # Batch requests use one of the two workers alone.
    assert num_tokens(1) > 0.5 * num_tokens(0)


def test_an_unreachable_itl_target_delays_no_other_request():
    """A request with an ITL target of 1 ms runs on the fastest worker and delays no others."""
    made = cell(SHAPE, num_pairs=1)
    running = [made.submit(100, 2000) for _ in range(3)]
    made.run(made.now + 1)
    impatient = made.submit(100, 10, slo_itl_s=0.001)
    others = [made.submit(100, 10) for _ in range(3)]
    made.run(made.now + 5)
    assert all(len(one.token_times) < 2000 for one in running)
    assert all(one.token_times and one.ttft_s < 0.2 for one in (impatient, *others))


def test_a_target_that_some_worker_keeps_decides_where_an_output_goes():
    made = cell(SHAPE, num_pairs=2)
    for _ in range(20):
        made.submit(100, 200)
    made.run(made.now + 2)
    slow = made.submit(100, 5, slo_itl_s=0.05)
    made.run(made.now + 2)
    assert slow.token_times


SLOW = LatencyModel(0.005, 0.0001, 0.0, 0.020, 0.002, 0.0)


def elastic(
    roles: str = "pd", model: LatencyModel = SLOW, ttft_ms: int = 1000, **shape
) -> VirtualCell:
    """An elastic cell with an ITL target of 50 ms; with SLOW, a worker keeps it with 15 outputs."""
    values = {
        "model": "simulated",
        "elastic": True,
        "lanes": {"batch": {"max_queue_s": 3600}},
        "scaling": {"targets": {"interactive": {"ttft_ms": ttft_ms, "itl_ms": 50}}},
    }
    made = VirtualCell(replace(CoreConfig.of(parse(values, "test")), latency=model))
    for index, role in enumerate(roles):
        value = common_pb2.ROLE_PREFILL if role == "p" else common_pb2.ROLE_DECODE
        made.add_worker(f"{role}{index}", value, WorkerShape(model, **shape))
    return made


def longest_mean_gap_s(outcomes: list[Outcome]) -> float:
    return max(sum(one.gaps_s) / len(one.gaps_s) for one in outcomes)


@pytest.mark.parametrize("num_seqs", [256, 20], ids=["ITL", "seats"])
def test_batch_outputs_make_room_in_an_elastic_cell(num_seqs):
    """Also if the KV cache has room, and only the steps are too long for another output."""
    made = elastic(kv_tokens=2**20, max_num_seqs=num_seqs)
    batch = [made.submit(64, 1000, lane=BATCH) for _ in range(60)]
    made.run(made.now + 5)
    answered = []
    for _ in range(10):
        answered.append(made.submit(64, 200))
        made.run(made.now + 0.5)
    made.run(made.now + 15)
    assert made.core.stats.num_parked > 0
    assert max(one.ttft_s for one in answered) < 0.5
    assert longest_mean_gap_s(answered) < 0.055
    made.run(made.now + 400)
    assert all(len(one.token_times) == 1000 for one in batch)
    made.core.check_integrity()


def test_batch_outputs_alone_in_an_elastic_cell_may_exceed_the_itl_target():
    """No interactive output is there whose target they could miss; larger steps compute more."""
    made = elastic(kv_tokens=2**20, max_num_seqs=256)
    for _ in range(60):
        made.submit(64, 1000, lane=BATCH)
    made.run(made.now + 5)
    assert sum(len(worker.ledger) for worker in made.core.workers) == 60
    made.submit(64, 400)
    late = [made.submit(64, 100, lane=BATCH) for _ in range(40)]
    made.run(made.now + 5)
    # Beside it, no more come than keep its target.
    assert not any(one.token_times for one in late)


def test_no_batch_output_is_parked_much_more_often_than_others():
    made = cell(WorkerShape(SLOW, kv_tokens=2**20, max_num_seqs=256), num_pairs=1, itl_ms=50)
    for _ in range(20):
        made.submit(2000, 3000, lane=BATCH)
    made.run(made.now + 10)
    for _ in range(30):
        made.submit(64, 20)
        made.run(made.now + 3)
    often = sorted(one.num_parked for one in made.core.running())
    assert often[0] > 8
    assert often[-1] <= often[0] + 2


def test_a_worker_without_kv_room_reads_no_prompts_in_an_elastic_cell():
    """Batch outputs fill one of three workers; prompts would wait in its engine for their end."""
    model = LatencyModel(0.005, 5e-5, 0.0, 0.012, 0.0002, 1e-7)
    shape = {"kv_tokens": 40_000, "max_num_seqs": 256, "max_num_batched_tokens": 4096}
    made = elastic("ppd", model, **shape)
    for _ in range(25):
        made.submit(500, 1500, lane=BATCH)
    made.run(made.now + 2)
    answered = []
    for _ in range(120):
        answered.append(made.submit(4000, 100))
        made.run(made.now + 1 / 6)
    made.run(made.now + 5)
    assert max(one.ttft_s for one in answered) < 0.6


def test_the_last_batch_output_yields_in_an_elastic_cell():
    """With a long context, it alone makes steps too long for the interactive outputs beside it."""
    model = LatencyModel(0.005, 0.0001, 0.0, 0.020, 0.001, 2e-6)
    made = elastic("pd", model, kv_tokens=2**20, max_num_seqs=256, max_model_len=32768)
    for _ in range(2):
        made.submit(12_000, 3000, lane=BATCH)
    made.run(made.now + 5)
    answered = []
    for _ in range(40):
        answered.append(made.submit(64, 200))
        made.run(made.now + 0.1)
    made.run(made.now + 30)
    assert made.core.stats.num_parked > 0
    assert longest_mean_gap_s(answered) < 0.055


@pytest.mark.parametrize("ttft_ms", [1500, 5000])
def test_batch_prompts_are_not_ahead_of_interactive_ones_in_an_elastic_cell(ttft_ms):
    made = elastic("pd", MODEL, ttft_ms, kv_tokens=2**17, max_model_len=32768)
    for _ in range(2):
        made.submit(8_000, 10, lane=BATCH)
    made.run(made.now + 0.1)
    made.submit(8_500, 10)
    made.run(made.now + 0.01)
    (request,) = (one for one in made.core.running() if one.submission.lane == INTERACTIVE)
    assert not request.is_late
    assert request.dispatched_at is not None


def test_batch_outputs_make_room_as_often_as_interactive_requests_need_it():
    made = elastic("pd", MODEL, kv_tokens=16_000, max_num_seqs=256)
    batch = [made.submit(500, 7000, lane=BATCH) for _ in range(24)]
    answered = []
    for _ in range(150):
        answered.append(made.submit(4000, 20))
        made.run(made.now + 1)
    made.run(made.now + 1)
    assert max(one.ttft_s for one in answered) < 1.0
    often = [one.num_parked for one in made.core.running()]
    assert max(often) > 8
    made.run(made.now + 1500)
    assert all(len(one.token_times) == 7000 for one in batch)


def test_no_batch_output_is_parked_for_a_prompt_that_waits_for_other_prompts(
    new_world, out, say_hello
):
    """In an elastic cell, only one of two workers has KV room, and it computes a prompt."""
    latency = LatencyModel(0.02, 1e-4, 0.0, 0.028, 0.0005, 1e-7)
    targets = LaneTargetsConfig(interactive=TargetsConfig(ttft_ms=5000))
    world = new_world(elastic=True, latency=latency, targets=targets, max_decode_requests=8)
    capacity, model = cluster_pb2.Capacity(), common_pb2.ModelDescription()
    capacity.CopyFrom(say_hello("x", common_pb2.ROLE_PREFILL).capacity)
    capacity.kv_tokens = 8192
    model.CopyFrom(say_hello("x", common_pb2.ROLE_PREFILL).model)
    model.max_model_len = 8192

    def submit(num_tokens: int, num_output: int, lane=INTERACTIVE):
        sampling = {"max_tokens": num_output}
        # The prompts have different lengths, and share no prefix.
        prompt = [num_tokens] * num_tokens
        to = world.submit(prompt_token_ids=prompt, sampling=sampling, lane=lane)
        return world.core.request(f"r{to.stream}")

    world.attach("x", common_pb2.ROLE_PREFILL, capacity=capacity, model=model)
    streams = [*(submit(200, 2000) for _ in range(4)), submit(5500, 200, BATCH)]
    for request in streams:
        world.step("x", out(request.id, [1]))
    world.attach("y", common_pb2.ROLE_DECODE, capacity=capacity, model=model)
    ahead = submit(3000, 1)
    assert ahead.prefill == ("y", 1)
    waiting = submit(3200, 100)
    assert not waiting.attempt
    assert streams[-1].state is RequestState.DECODING
    world.step("y", out(ahead.id, [1], finish=common_pb2.FINISH_REASON_LENGTH))
    assert waiting.attempt == 1
    assert streams[-1].num_parked == 0


def uneven(rng: random.Random) -> int:
    return int(rng.lognormvariate(5.5, 0.9)) + 1


def test_no_batch_output_is_parked_for_a_request_that_does_not_fit_even_then():
    """It waits for one of three interactive outputs."""
    rng, made = random.Random(1), cell(LITTLE_ROOM, num_pairs=1)
    for _ in range(100):
        made.submit(100, uneven(rng), lane=BATCH)
    for _ in range(20):
        made.submit(100, 3000)
    made.run(made.now + 600)
    for _ in range(3):
        made.submit(100, 3000)
    made.run(made.now + 1)
    made.poisson(8, made.now, made.now + 30, lambda: made.submit(100, uneven(rng), lane=BATCH))
    made.run(made.now + 10)
    num_parked = made.core.stats.num_parked
    large = made.submit(7900, 20)
    made.run(made.now + 10)
    assert not large.token_times
    assert made.core.stats.num_parked - num_parked < 5
    made.run(made.now + 120)
    assert len(large.token_times) == 20


def test_batch_outputs_that_outlive_most_others_make_room():
    made = cell(LITTLE_ROOM, num_pairs=1)
    for _ in range(92):
        made.submit(100, 20, lane=BATCH)
    for _ in range(8):
        made.submit(100, 4000, lane=BATCH)
    made.run(made.now + 400)
    for _ in range(8):
        made.submit(200, 4000, lane=BATCH)
    made.run(made.now + 2)
    large = made.submit(7500, 20)
    made.run(made.now + 60)
    assert large.ttft_s < 2.0
    made.core.check_integrity()
