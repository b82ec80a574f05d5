"""KV room of a simulated worker: requests wait for blocks and are preempted when they run out."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.load.duration_histogram import DurationHistogram
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.colocated import ColocatedCell
from baton.simulator.kv_room import num_blocks, num_steps_that_fit
from baton.simulator.parts import Shape
from baton.simulator.policies import Static

MODEL = LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0)
SHAPE = Shape(
    MODEL,
    kv_tokens=100_000,
    max_num_batched_tokens=512,
    max_model_len=8192,
    follows_step_targets=False,
)


def steady(rate: float, seconds: float, prompt: int, output: int) -> list[Arrival]:
    return [Arrival(n / rate, prompt, output) for n in range(round(rate * seconds))]


class SummedGaps(DurationHistogram):
    """A histogram that also knows the sum of its durations."""

    sum_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.sum_s += seconds * count
        super().add(seconds, count)


@pytest.mark.parametrize("swaps", [False, True])
def test_gaps_include_the_time_for_which_a_handed_over_request_was_preempted(swaps):
    free = {"max_queued": 10**6, "max_queue_s": 3600}
    config = CoreConfig.of(
        parse(
            {
                "model": "simulated",
                "decode": {"local_prefill": False},
                "lanes": {"interactive": free},
            },
            "test",
        )
    )
    tight = replace(SHAPE, kv_tokens=3200, announced_kv_tokens=0, swaps=swaps)
    made = SimulatedCell(config, dict.fromkeys(Pool, tight), Static(ScalingConfig()))
    gaps = made.gaps = SummedGaps()
    record = made.run(steady(10, 10, 203, 301), {Pool.PREFILL: 1, Pool.DECODE: 1}, 11)
    assert not record.reasons
    assert gaps.total == 100 * 300
    decoding_s = math.fsum(record.ends) - math.fsum(record.firsts)
    assert gaps.sum_s == pytest.approx(decoding_s, rel=0.001)


def test_steps_that_fit_agree_with_counting_step_by_step():
    chance = random.Random(5)
    for _ in range(300):
        size = chance.choice([1, 4, 16])
        lengths = [chance.randrange(1, 60) for _ in range(chance.randrange(1, 6))]
        room, most = chance.randrange(1, 120), chance.randrange(1, 50)
        steps = 1
        while steps < most and sum(-(-(one + steps + 1) // size) for one in lengths) <= room:
            steps += 1
        assert num_steps_that_fit(lengths, most, room, size) == steps


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("block_size_tokens", [16, 400])
def test_requests_wait_for_kv_blocks_and_all_end(prefix_caching, block_size_tokens):
    tight = replace(
        SHAPE,
        kv_tokens=3200,
        block_size_tokens=block_size_tokens,
        prefix_caching=prefix_caching,
    )
    made = ColocatedCell(tight, 1)
    gaps = made.gaps = SummedGaps()
    reports = []

    def watch() -> None:
        reports.append(made.workers[0].report())
        if made.now < 1060:
            made.at(made.now + 0.0137, watch)

    made.at(1000.0, watch)
    record = made.run(steady(10, 10, prompt=203, output=301), 11)
    assert not any(map(math.isnan, record.ends))
    assert max(one.kv_tokens_used for one in reports) <= 3200
    # A request begins with 203 tokens and ends with 504.
    most = max(one.num_running for one in reports)
    assert 3200 // num_blocks(504, block_size_tokens) // block_size_tokens <= most
    assert most <= 3200 // block_size_tokens // num_blocks(204, block_size_tokens)
    assert max(one.num_waiting for one in reports) > 50
    # Requests that outgrow the room are preempted, and the gaps include that time.
    decoding_s = math.fsum(record.ends) - math.fsum(record.firsts)
    assert gaps.total == 100 * 300
    assert gaps.sum_s == pytest.approx(decoding_s, rel=1e-6)
    assert gaps.percentile(100) > 0.5
    roomy = ColocatedCell(SHAPE, 1).run(steady(10, 10, prompt=203, output=301), 11)
    assert max(record.ends) > max(roomy.ends)


def test_a_request_larger_than_the_kv_cache_runs_alone():
    made = ColocatedCell(replace(SHAPE, kv_tokens=320), 1)
    record = made.run([Arrival(0.0, 1000, 5), Arrival(0.0, 100, 5)], 1)
    assert record.firsts[1] > record.ends[0]
