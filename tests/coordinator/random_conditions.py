"""What one run of a random cell is like: everything about it that stays as it is."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from virtual_cell import WorkerShape

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.scaling_config import (
    PoolLimits,
    ScalingConfig,
    ScalingSettings,
    Targets,
)
from baton.runtime.config import (
    BatchLaneConfig,
    InteractiveLaneConfig,
    LanesConfig,
    LatencyConfig,
    TenantConfig,
    parse,
)
from baton.runtime.latency import LatencyModel

SHAPE = WorkerShape(LatencyModel.from_config(LatencyConfig()), max_num_seqs=16)
REVISIONS = ("1", "v2", "v3")
TENANTS = {
    "narrow": TenantConfig(max_concurrent=1),
    "two": TenantConfig(max_concurrent=2, weight=3),
    "limited": TenantConfig(tokens_per_s=200),
}


@dataclass(frozen=True, slots=True)
class Conditions:
    """Drawn once for a run; times in seconds, shares of 1.

    Attributes:
        faults: processes die, stand still and lose their connections; without, nothing may fail
            that its client did not bring about.
        launched: the coordinator starts its workers; otherwise they come by themselves.
        tight: queues are short in places and in time, so that requests are shed.
        step_s: of decoding. token_s: of computing one prompt token. handoff_s: least and most.
        delay_s: of every message between coordinator and worker.
        kv_tokens, keeps_prefixes, forces_tokens: of the workers.
        most_handed_tokens: of a prompt that is handed over.
        grace_s: without a coordinator, until workers end what they have.
        fails: requests that an engine refuses. gives_up: steps at which it gives one up.
        loses: handoffs that fail. forgets: handoffs whose skipped prefix is no longer there.
        adapters: by revision.
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
    most_handed_tokens: int
    grace_s: float
    fails: float
    gives_up: float
    loses: float
    forgets: float
    adapters: dict[str, tuple[str, ...]]
    config: CoreConfig


def draw(chance: random.Random, *, faults: bool) -> Conditions:
    """Any conditions, with faults or without."""
    tight = chance.random() < 0.4
    adapters = chance.choice([(), ("fr", "de")])
    return Conditions(
        faults=faults,
        launched=chance.random() < 0.5,
        tight=tight,
        step_s=chance.choice([0.01, 0.02, 0.05]),
        token_s=chance.choice([0.0001, 0.001, 0.003]),
        handoff_s=chance.choice([(0.001, 0.002), (0.01, 0.2), (0.5, 3.0)]),
        delay_s=chance.choice([0.0005, 0.002, 0.02]),
        kv_tokens=chance.choice([400, 2000, 65536]),
        keeps_prefixes=chance.random() < 0.8,
        forces_tokens=chance.random() < 0.8,
        most_handed_tokens=chance.choice([100, 10**6, 10**6]),
        grace_s=chance.choice([1.0, 30.0]),
        fails=chance.choice([0.0, 0.0, 0.02]) if faults else 0.0,
        gives_up=chance.choice([0.0, 0.0, 0.001]) if faults else 0.0,
        loses=chance.choice([0.0, 0.0, 0.2]) if faults else 0.0,
        forgets=chance.choice([0.0, 0.3]),
        adapters={
            "1": adapters,
            "v2": adapters[:1] if chance.random() < 0.5 else adapters,
            "v3": () if chance.random() < 0.5 else adapters,
        },
        config=_config(chance, faults=faults, tight=tight),
    )


def _config(chance: random.Random, *, faults: bool, tight: bool) -> CoreConfig:
    scaling = ScalingConfig(
        prefill=PoolLimits(chance.choice([0, 1, 1]), 3),
        decode=PoolLimits(chance.choice([0, 1, 1]), 3),
        cold_start_s=chance.choice([3.0, 10.0]),
        start_timeout_s=20.0,
        down_window_s=chance.choice([10.0, 30.0]),
        interval_s=chance.choice([1.0, 5.0]),
        flip=chance.random() < 0.8,
        flip_quiet_s=10.0,
        idle_s=chance.choice([10.0, 60.0]),
        max_gpus=chance.choice([None, None, 5]),
        targets=(
            (
                "interactive",
                Targets(ttft_s=chance.choice([0.2, 2.0]), itl_s=chance.choice([0.03, 0.2])),
            ),
        ),
    )
    max_queued = 8 if tight else 100
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(
            max_queued=max_queued,
            max_queue_s=20.0 if tight else 600.0,
            ttft_ms=600 if tight and chance.random() < 0.5 else None,
            itl_ms=chance.choice([1, 16, 100]),
        ),
        batch=BatchLaneConfig(
            max_queued=max_queued,
            max_queue_s=40.0 if tight else 1000.0,
            max_running=chance.choice([2, 8]),
        ),
        long_prompt_tokens=chance.choice([0, 100]),
    )
    return replace(
        CoreConfig.of(parse({"model": "simulated"}, "test")),
        scaling=ScalingSettings(
            scaling, autoscale=chance.random() < 0.6, drain_s=chance.choice([5.0, 30.0, 200.0])
        ),
        max_running_requests=200,
        max_request_s=chance.choice([60.0, 200.0]) if faults else 1000.0,
        max_prefill_requests=chance.choice([1, 2, 4]),
        max_decode_requests=chance.choice([1, 4, 8]),
        local_prefill=chance.random() < 0.5,
        max_recovery_s=30.0,
        max_lost_attempts=4,
        handoff_timeout_s=5.0,
        worker_timeout_s=10.0,
        worker_silent_s=2.0,
        worker_stuck_s=20.0,
        lanes=lanes,
        tenants=TENANTS,
    )
