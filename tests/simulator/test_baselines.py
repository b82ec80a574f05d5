"""The HPA baseline follows Kubernetes' rule: ratio, tolerance, growth limit, stabilisation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.coordinator.scaling.autoscale.types import DecodeLoad, Observation, Phase, WorkerView
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.coordinator.state.scaling_decision import Drain, SetSize
from baton.load.traces import Arrival
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.baselines import Hpa
from baton.simulator.parts import Shape
from baton.simulator.run import policy_of

MODEL = LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0)
CONFIG = ScalingConfig(prefill=PoolLimits(1, 20), decode=PoolLimits(1, 20))
PREFILL_DEPTH, DECODE_DEPTH = 2.0, 10.0
TARGETS = (("interactive", Targets(0.5, 0.05)),)


def observation(num_prefill: int, num_decode: int, in_prefill: int, decodes: int) -> Observation:
    workers = tuple(
        WorkerView(f"{pool.value}-{index}", pool, Phase.SERVING, 0.0)
        for pool, number in ((Pool.PREFILL, num_prefill), (Pool.DECODE, num_decode))
        for index in range(number)
    )
    load = DecodeLoad(num_in_prefill=in_prefill, num_decodes=decodes)
    return Observation(0.0, workers, MODEL, decode=load)


def sizes(hpa: Hpa, now: float, *numbers: int) -> tuple[int, int]:
    decision = hpa.decide(observation(*numbers), hpa.config, now)
    return decision.prefill.target, decision.decode.target


def hpa(config: ScalingConfig = CONFIG) -> Hpa:
    return Hpa(config, PREFILL_DEPTH, DECODE_DEPTH)


@pytest.mark.parametrize(
    ("in_prefill", "decodes", "expected"),
    [
        (8, 40, (4, 4)),  # Exactly at the target.
        (8, 43, (4, 4)),  # 7.5 % above: within the tolerance.
        (8, 45, (4, 5)),
        (9, 40, (5, 4)),
        (40, 40, (8, 4)),  # At most 4 more or twice the size.
    ],
)
def test_a_pool_grows_in_proportion_to_its_depth(in_prefill, decodes, expected):
    assert sizes(hpa(), 0.0, 4, 4, in_prefill, decodes) == expected


def test_a_pool_shrinks_to_the_largest_size_wanted_within_five_minutes():
    one = hpa()
    assert sizes(one, 0.0, 4, 4, 8, 40) == (4, 4)
    # 37 decodes are within the tolerance; 20 decodes need 2 workers.
    assert sizes(one, 15.0, 4, 4, 8, 37) == (4, 4)
    assert sizes(one, 30.0, 4, 4, 8, 20) == (4, 4)
    assert sizes(one, 310.0, 4, 4, 8, 20) == (4, 4)
    assert sizes(one, 316.0, 4, 4, 8, 20) == (4, 2)


def test_actions_change_the_pools_to_the_decided_sizes():
    one = hpa()
    one.decide(observation(4, 4, 8, 40), one.config, 0.0)
    decision = one.decide(observation(4, 4, 16, 20), one.config, 400.0)
    assert SetSize(Pool.PREFILL, 8) in decision.actions
    assert sum(isinstance(action, Drain) for action in decision.actions) == 2


def test_baselines_start_no_more_workers_than_there_are_gpus():
    config = replace(
        CONFIG, max_gpus=12, prefill=PoolLimits(1, 20, gpus=1), decode=PoolLimits(1, 20, gpus=2)
    )
    # Without the limit: 7 prefill and 6 decode workers on 19 GPUs.
    assert sizes(hpa(config), 0.0, 3, 3, 40, 60) == (4, 4)
    full = replace(config, max_gpus=9)
    assert sizes(hpa(full), 0.0, 3, 3, 40, 60) == (3, 3)


def test_the_depth_of_the_decode_pool_counts_the_kv_cache():
    """A worker within its ITL target may have no room for as many requests."""
    arrivals = [Arrival(float(n), 2000, 300) for n in range(10)]
    # The ITL target allows 300 requests, and the KV cache holds 20 of 2,300 tokens.
    for kv_tokens, expected in ((46_000, 4), (4_600_000, 3)):
        shape = Shape(MODEL, kv_tokens=kv_tokens, max_num_seqs=300, follows_step_targets=True)
        one = policy_of("hpa", replace(CONFIG, targets=TARGETS), arrivals, shape)
        # 60 requests are 20 for each worker; the target depth is 80 % of what a worker can hold.
        assert sizes(one, 0.0, 3, 3, 6, 60) == (3, expected)
