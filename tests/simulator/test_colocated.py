"""Colocated serving in the simulator: chunked prefill, KV room, preemption, the balancer."""

from __future__ import annotations

import pytest

from baton.load.traces import Arrival
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.colocated import Balancer, ColocatedCell
from baton.simulator.parts import Shape

# A decode costs as much as a prompt token, so every full step takes equally long.
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


def ttfts(record) -> list[float]:
    return [first - at for first, at in zip(record.firsts, record.arrivals, strict=True)]


# ---- Against first principles.


def test_a_request_alone_takes_its_prefill_and_its_decode_steps():
    made = ColocatedCell(SHAPE, 1)
    record = made.run(steady(0.2, 20, prompt=400, output=11), 21)
    assert ttfts(record) == pytest.approx([MODEL.prefill_s(400) + 2 * SHAPE.delay_s] * 4)
    decodes = [end - first for first, end in zip(record.firsts, record.ends, strict=True)]
    assert decodes == pytest.approx([10 * MODEL.decode_step_s(1, 0)] * 4)


def test_a_prompt_longer_than_a_step_pays_one_base_per_chunk():
    made = ColocatedCell(SHAPE, 1)
    record = made.run([Arrival(0.0, 2000, 1)], 1)
    assert ttfts(record) == pytest.approx([4 * 0.005 + 2000e-4 + 2 * SHAPE.delay_s])


def test_a_mixed_step_pays_one_base_and_delays_the_decodes():
    made = ColocatedCell(SHAPE, 1)
    # The second prompt arrives while the first request decodes.
    record = made.run([Arrival(0.0, 100, 50), Arrival(0.1, 300, 1)], 1)
    mixed_s = MODEL.mixed_base_s + 300e-4 + 1e-4
    lasted_s = record.ends[0] - record.firsts[0]
    assert lasted_s == pytest.approx(48 * MODEL.decode_step_s(1, 0) + mixed_s)
    # The prompt waits for the step that runs when it arrives.
    waited_s = ttfts(record)[1] - mixed_s - 2 * SHAPE.delay_s
    assert 0 <= waited_s <= MODEL.decode_step_s(1, 0)


def test_an_overloaded_worker_serves_one_full_step_after_another():
    made = ColocatedCell(SHAPE, 1)
    record = made.run(steady(12, 60, prompt=1000, output=10), 61)
    # A full step has 512 tokens; a request needs 1,000 prompt tokens and 9 decodes.
    full_step_s = MODEL.mixed_base_s + 512e-4
    capacity = 512 / full_step_s / 1009
    served_s = max(record.ends) - 1000
    assert len(record.ends) / served_s == pytest.approx(capacity, rel=0.01)
    # First come, first served: the queue grows by the excess load.
    assert ttfts(record)[-1] == pytest.approx(720 / capacity - 60, rel=0.03)
    assert made.gaps.percentile(100) == pytest.approx(full_step_s, rel=0.01)


def test_two_workers_serve_twice_the_load_of_one():
    one = ColocatedCell(SHAPE, 1).run(steady(12, 60, prompt=1000, output=10), 61)
    two = ColocatedCell(SHAPE, 2).run(steady(24, 60, prompt=1000, output=10), 61)
    assert max(two.ends) == pytest.approx(max(one.ends), rel=0.001)
    assert two.gpu_hours == pytest.approx(2 * one.gpu_hours)


# ---- The balancer.


def test_the_balancer_chooses_the_fewest_requests_and_equal_workers_take_turns():
    balancer = Balancer(3)
    assert [balancer.send() for _ in range(4)] == [0, 1, 2, 0]
    balancer.finished(2)
    assert balancer.send() == 2
    balancer.finished(0)
    balancer.finished(0)
    assert [balancer.send() for _ in range(3)] == [0, 1, 2]


def test_no_worker_is_no_cell():
    with pytest.raises(ValueError, match="num_workers is 0; must be at least 1"):
        ColocatedCell(SHAPE, 0)
