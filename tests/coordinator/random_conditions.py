"""Conditions of one run of a random cell: all settings that stay constant during the run."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.scaling_config import (
    PoolLimits,
    ScalingConfig,
    ScalingSettings,
)
from baton.runtime.config import (
    BatchLaneConfig,
    InteractiveLaneConfig,
    LanesConfig,
    LaneTargetsConfig,
    LatencyConfig,
    TargetsConfig,
    TenantConfig,
    parse,
)
from baton.runtime.steps.latency import LatencyModel
from tests.coordinator.virtual_cell import WorkerShape

SHAPE = WorkerShape(LatencyModel.from_config(LatencyConfig()), max_num_seqs=16)
REVISIONS = ("1", "v2", "v3")
TENANTS = {
    "narrow": TenantConfig(max_concurrent=1),
    "two": TenantConfig(max_concurrent=2, weight=3),
    "limited": TenantConfig(tokens_per_s=200),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Settings drawn once for a run; all probabilities are between 0 and 1.

    Attributes:
        faults: Processes die, stop (SIGSTOP) and lose connections. Without faults no request may
            fail unless its client causes that.
        launched: The coordinator starts its workers; otherwise workers start by themselves.
        tight: Queue lengths and queue times are limited, so that requests are refused.
        step_s: Duration of a decode step.
        token_s: Time to compute one prompt token.
        handoff_s: Shortest and longest duration of a handoff.
        delay_s: Delay of every message between coordinator and worker.
        kv_tokens: Size of a worker's KV cache in tokens.
        keeps_prefixes: Whether workers have a prefix cache.
        forces_tokens: Whether engines can replay known output tokens.
        max_handoff_tokens: Longest prompt that a decode worker can receive, in tokens.
        grace_s: Time without a coordinator after which workers fail their requests.
        p_refused: Probability that an engine refuses a request.
        p_gives_up: Probability per step that an engine gives up a request.
        p_handoff_fails: Probability that a handoff fails.
        p_prefix_gone: Probability that the skipped prefix of a handoff was evicted.
        adapters: Names of the adapters of each revision.
    """

    faults: bool
    launched: bool
    tight: bool
    step_s: float
    token_s: float
    handoff_s: tuple[float, float]
    delay_s: float
    kv_tokens: int
    keeps_prefixes: bool
    forces_tokens: bool
    max_handoff_tokens: int
    grace_s: float
    p_refused: float
    p_gives_up: float
    p_handoff_fails: float
    p_prefix_gone: float
    adapters: dict[str, tuple[str, ...]]
    config: CoreConfig


def draw(rng: random.Random, *, faults: bool) -> Conditions:
    """Draws the conditions of a run."""
    tight = rng.random() < 0.4
    adapters = rng.choice([(), ("fr", "de")])
    return Conditions(
        faults=faults,
        launched=rng.random() < 0.5,
        tight=tight,
        step_s=rng.choice([0.01, 0.02, 0.05]),
        token_s=rng.choice([0.0001, 0.001, 0.003]),
        handoff_s=rng.choice([(0.001, 0.002), (0.01, 0.2), (0.5, 3.0)]),
        delay_s=rng.choice([0.0005, 0.002, 0.02]),
        kv_tokens=rng.choice([400, 2000, 65536]),
        keeps_prefixes=rng.random() < 0.8,
        forces_tokens=rng.random() < 0.8,
        max_handoff_tokens=rng.choice([100, 10**6, 10**6]),
        grace_s=rng.choice([1.0, 30.0]),
        p_refused=rng.choice([0.0, 0.0, 0.02]) if faults else 0.0,
        p_gives_up=rng.choice([0.0, 0.0, 0.001]) if faults else 0.0,
        p_handoff_fails=rng.choice([0.0, 0.0, 0.2]) if faults else 0.0,
        p_prefix_gone=rng.choice([0.0, 0.3]),
        adapters={
            "1": adapters,
            "v2": adapters[:1] if rng.random() < 0.5 else adapters,
            "v3": () if rng.random() < 0.5 else adapters,
        },
        config=_config(rng, faults=faults, tight=tight),
    )


def _config(rng: random.Random, *, faults: bool, tight: bool) -> CoreConfig:
    scaling = ScalingConfig(
        prefill=PoolLimits(rng.choice([0, 1, 1]), 3),
        decode=PoolLimits(rng.choice([0, 1, 1]), 3),
        cold_start_s=rng.choice([3.0, 10.0]),
        start_timeout_s=20.0,
        down_window_s=rng.choice([10.0, 30.0]),
        interval_s=rng.choice([1.0, 5.0]),
        flip=rng.random() < 0.8,
        flip_quiet_s=10.0,
        idle_s=rng.choice([10.0, 60.0]),
        max_gpus=rng.choice([None, None, 5]),
    )
    targets = LaneTargetsConfig(
        interactive=TargetsConfig(
            ttft_ms=rng.choice([200, 2000]),
            itl_ms=rng.choice([30, 200]),
            ttft_ms_per_1k_tokens=rng.choice([0, 1000]),
        )
    )
    max_queued = 8 if tight else 100
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(
            max_queued=max_queued,
            max_queue_s=20.0 if tight else 600.0,
            ttft_ms=600 if tight and rng.random() < 0.5 else None,
            itl_ms=rng.choice([1, 16, 100]),
        ),
        batch=BatchLaneConfig(
            max_queued=max_queued,
            max_queue_s=40.0 if tight else 1000.0,
            max_running=rng.choice([2, 8]),
        ),
        long_prompt_tokens=rng.choice([0, 100]),
    )
    return replace(
        CoreConfig.of(parse({"model": "simulated"}, "test")),
        scaling=ScalingSettings(
            scaling, autoscale=rng.random() < 0.6, drain_s=rng.choice([5.0, 30.0, 200.0])
        ),
        max_running_requests=200,
        max_request_s=rng.choice([60.0, 200.0]) if faults else 1000.0,
        max_prefill_requests=rng.choice([1, 2, 4]),
        max_decode_requests=rng.choice([1, 4, 8]),
        local_prefill=rng.random() < 0.5,
        elastic=rng.random() < 0.5,
        max_recovery_s=30.0,
        max_lost_attempts=4,
        handoff_timeout_s=5.0,
        worker_timeout_s=10.0,
        worker_silent_s=2.0,
        worker_stuck_s=20.0,
        targets=targets,
        lanes=lanes,
        tenants=TENANTS,
    )
