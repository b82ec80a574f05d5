"""KV room of a simulated worker: requests wait for blocks and are preempted when they run out."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.load.gap_histogram import GapHistogram
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.kv_room import num_steps_that_fit
from baton.simulator.parts import Shape
from baton.simulator.policies import Static

MODEL = LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0)
SHAPE = Shape(MODEL, kv_tokens=100_000, max_num_batched_tokens=512, max_model_len=8192)


def steady(rate: float, seconds: float, prompt: int, output: int) -> list[Arrival]:
    return [Arrival(n / rate, prompt, output) for n in range(round(rate * seconds))]


class SummedGaps(GapHistogram):
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
