"""The search for the smallest pools that meet the targets in every window of a trace."""

from __future__ import annotations

from dataclasses import replace

from baton.bench.autoscale_peak import Search, within
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.policies import Static

MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
SHAPE = Shape(
    MODEL,
    kv_tokens=100_000,
    max_num_batched_tokens=512,
    max_model_len=8192,
    follows_step_targets=False,
)
SCALING = ScalingConfig(prefill=PoolLimits(1, 8), decode=PoolLimits(1, 8), cold_start_s=20.0)
CORE = replace(
    CoreConfig.of(
        parse(
            {
                "model": "simulated",
                "coordinator": {"max_running_requests": 10**6},
                "decode": {"local_prefill": False},
                "lanes": {"interactive": {"max_queued": 10**6, "max_queue_s": 3600}},
            },
            "test",
        )
    ),
    latency=MODEL,
)


def steady(rate: float, seconds: float, begin_s: float = 0.0) -> list[Arrival]:
    """Arrivals at a fixed rate; their lengths follow a repeating pattern."""
    return [
        Arrival(begin_s + n / rate, 400 + 37 * (n % 11), 61 + 13 * (n % 7))
        for n in range(round(rate * seconds))
    ]


def test_the_search_finds_the_smallest_pools_of_each_window():
    # The load doubles in the second window.
    arrivals = [*steady(12, 15), *steady(24, 15, begin_s=15)]
    targets = Targets(0.3, 0.02)

    def trial(some, tried):
        cell = SimulatedCell(CORE, dict.fromkeys(Pool, SHAPE), Static(SCALING))
        return cell.run(some, dict(tried), some[-1].at_s + 1)

    search = Search(trial, targets, plenty=4, window_s=15.0, warm_up_s=5.0)
    best = search.best(arrivals)
    first, second = (
        search.of_window(arrivals, index, best[index], dict.fromkeys(Pool, 1)) for index in range(2)
    )
    peak = {pool: search.fewest(arrivals, pool, best, first) for pool in Pool}
    assert first[Pool.PREFILL] < second[Pool.PREFILL]
    assert peak == {pool: max(first[pool], second[pool]) for pool in Pool}
    held = within(trial(arrivals, peak), targets, 15.0)
    assert [one.ttft >= 0.95 * count for one, count in zip(held, (180, 360), strict=True)] == [
        True,
        True,
    ]
