"""Requests' own latency targets in the simulator: TTFT that grows with the prompt, and ITL."""

from __future__ import annotations

import pytest

from baton.coordinator.state.scaling_config import in_seconds
from baton.load.traces import Arrival
from baton.runtime.config import BatonConfig, parse
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.runtime.steps.step_messages import to_message
from baton.simulator import comparison
from baton.simulator.colocated import ColocatedCell
from baton.simulator.parts import Shape
from baton.simulator.run import simulate
from baton.v1 import cluster_pb2

LONG = Arrival(2.0, 30_000, 2)


def config(slope_ms: int) -> BatonConfig:
    """Two elastic workers. A prompt token takes 0.1 ms; the base target is 500 ms."""
    return parse(
        {
            "simulated": {
                "prefill_base_ms": 5,
                "prefill_per_token_ms": 0.1,
                "step_base_ms": 10,
                "max_model_len": 65536,
                "max_num_batched_tokens": 2048,
            },
            "scaling": {
                "targets": {"interactive": {"ttft_ms": 500, "ttft_ms_per_1k_tokens": slope_ms}}
            },
            "prefill": {"workers": 1},
            "decode": {"workers": 1},
            "elastic": True,
        },
        "test",
    )


def with_short_prompts(rate: float, lasts_s: float) -> list[Arrival]:
    """Short prompts of 0.15 s at equal distances, and the long one of 3 s."""
    short = [Arrival(number / rate, 1500, 2) for number in range(round(rate * lasts_s))]
    return sorted([*short, LONG], key=lambda one: one.at_s)


def test_a_long_prompt_goes_before_others_only_while_it_can_be_in_time():
    """Its target of 6.5 s leaves time to compute it; with one of 500 ms it waits for all others."""
    arrivals = with_short_prompts(rate=13, lasts_s=20)
    index = arrivals.index(LONG)
    fixed_s, growing_s = (
        record.firsts[index] - record.arrivals[index]
        for slope_ms in (0, 200)
        for record in (simulate(config(slope_ms), arrivals, "static").record,)
    )
    assert growing_s <= 6.5 < 10 < fixed_s


def test_requests_are_attained_by_their_own_target():
    arrivals = [Arrival(0.0, 1000, 2), Arrival(5.0, 30_000, 2)]
    for slope_ms, attained in ((0, 0.5), (200, 1.0)):
        figures = simulate(config(slope_ms), arrivals, "static").figures
        assert figures.attained == figures.ttft_within == attained
        assert figures.targets["ttft_ms_per_1k_tokens"] == slope_ms
        target_s = 0.5 + 0.03 * slope_ms
        assert figures.ttft_ratio[99] == pytest.approx(
            figures.ttft_ms[99] / 1e3 / target_s, rel=0.1
        )


def test_a_comparison_says_what_attained_means():
    for slope_ms, told in ((0, "500 ms and"), (200, "500 ms + 200 ms per 1,000 prompt tokens and")):
        targets = in_seconds(config(slope_ms).scaling.targets.interactive)
        assert f"TTFT within {told} mean ITL within 50 ms" in comparison.legend(targets)


class Picky(ColocatedCell):
    """A server whose first request names an ITL target."""

    itl_ms = 0

    def at(self, when, action, *arguments):
        for one in arguments:
            if isinstance(one, cluster_pb2.DecodeCommand) and one.spec.request_id == "0":
                one.spec.itl_ms = self.itl_ms
        super().at(when, action, *arguments)


@pytest.mark.parametrize("others", [1, 2])
def test_the_tightest_itl_target_of_the_streams_limits_the_steps(others):
    """The worker's target is 30 ms. Prompts keep it busy beside the streams."""
    model = LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0)
    shape = Shape(model, max_num_batched_tokens=2048, follows_step_targets=True)
    streams = [Arrival(0.0, 10, 300) for _ in range(others)]
    prompts = [Arrival(0.5 + number / 10, 3000, 1) for number in range(80)]
    mean_s = {}
    for itl_ms in (0, 20, 60):
        cell = Picky(shape, 1)
        cell.workers[0].take(to_message(StepTargets(0.03, 0.036, 0.1)))
        cell.itl_ms = itl_ms
        record = cell.run([*streams, *prompts], 10.0)
        mean_s[itl_ms] = (record.ends[0] - record.firsts[0]) / 299
    assert 0.024 < mean_s[0] <= 0.03
    assert 0.016 < mean_s[20] <= 0.02
    # A second stream without a target of its own keeps the worker's.
    if others == 1:
        assert mean_s[60] > 0.035
    else:
        assert mean_s[60] == pytest.approx(mean_s[0], rel=0.02)
