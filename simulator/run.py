"""Runs one simulation from a configuration (`baton simulate`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import (
    ScalingConfig,
    check_limits,
    in_seconds,
    scaling_config,
)
from baton.load import traces
from baton.load.traces import Arrival
from baton.runtime.config import BatonConfig, SimulatedConfig
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.baselines import Hindsight, Hpa, Planner, hpa_decode_depth, needed_sizes
from baton.simulator.cell import ColdStart, SimulatedCell
from baton.simulator.colocated import ColocatedCell
from baton.simulator.kv_room import num_blocks
from baton.simulator.parts import Shape
from baton.simulator.policies import Baton, Policy, Static
from baton.simulator.record import Record
from baton.simulator.report import Figures, PromptHits, figures

COLOCATED = "colocated"
# Policies that size the pools within the limits of the section `scaling`.
SCALING_POLICIES = ("baton", "hpa", "planner", "hindsight")
POLICIES = ("static", COLOCATED, *SCALING_POLICIES)
_SPAN_S = 10.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation."""

    figures: Figures
    record: Record


def simulate(
    config: BatonConfig,
    arrivals: Sequence[Arrival],
    policy: str,
    engines: Mapping[Pool, SimulatedConfig] | None = None,
) -> Simulation:
    """Runs a trace on simulated workers.

    Args:
        config: The section `simulated` describes a worker, `scaling` has targets and limits, and
            `prefill.workers` and `decode.workers` are the initial pool sizes.
        arrivals: Requests in order of time.
        policy: One of POLICIES; "static" keeps the initial pool sizes. "colocated" uses as many
            plain servers as both pools have workers.
        engines: Settings of the workers of some pools, instead of the section `simulated`. Plain
            servers have those of `simulated`. All have the same size of KV blocks.

    Raises:
        ValueError: the policy does not exist, there is no worker, a decode step would take no time,
            or a request exceeds `simulated.max_model_len` or `simulated.kv_tokens`.
        ConfigError: the policy sizes the pools, and the initial sizes are over the limits of the
            section `scaling`.
    """
    if policy in SCALING_POLICIES:
        check_limits(config, f"the policy {policy} sizes the pools")
    longest = traces.longest(arrivals)
    for pool, engine in (engines or {}).items():
        _check_kv_tokens(engine, longest, f" of the {pool.value} workers")
    _check_kv_tokens(config.simulated, longest)
    engines = dict.fromkeys(Pool, config.simulated) | dict(engines or {})
    shortest = min(one.max_model_len for one in (config.simulated, *engines.values()))
    if longest > shortest:
        raise ValueError(
            f"simulated.max_model_len: is {shortest}; must be at least {longest}, the longest "
            "request of the trace"
        )
    scaling, shape = scaling_config(config), shape_of(config)
    targets = in_seconds(config.scaling.targets.interactive)
    lasts_s = arrivals[-1].at_s + 1.0
    most_hits = traces.shared_prompt_tokens(arrivals, shape.block_size_tokens)
    if policy == COLOCATED:
        number = config.prefill.workers + config.decode.workers
        if not number:
            raise ValueError("prefill.workers and decode.workers are 0; one must be at least 1")
        plain = ColocatedCell(
            replace(shape, follows_step_targets=False), number, scaling.limits(Pool.DECODE).gpus
        )
        record = plain.run(arrivals, lasts_s)
        found = figures(record, plain.gaps, targets, PromptHits.of(plain.prompt_tokens, most_hits))
        return Simulation(found, record)
    core = replace(CoreConfig.of(config), model_name="simulated", latency=shape.model)
    cell = SimulatedCell(
        core,
        {pool: shape_of(config, engine) for pool, engine in engines.items()},
        policy_of(policy, scaling, arrivals, shape),
        cold_start=ColdStart.lasting(scaling.cold_start_s),
        heartbeat_s=config.coordinator.heartbeat_s,
        gpus={pool: scaling.limits(pool).gpus for pool in Pool},
    )
    sizes = {Pool.PREFILL: config.prefill.workers, Pool.DECODE: config.decode.workers}
    record = cell.run(arrivals, sizes, lasts_s)
    hits = PromptHits.of(cell.prompt_tokens, most_hits)
    return Simulation(figures(record, cell.gaps, targets, hits), record)


def _check_kv_tokens(engine: SimulatedConfig, longest: int, of: str = "") -> None:
    """Checks that the KV cache holds the longest request alone; a worker serves no longer one."""
    block = engine.block_size_tokens
    needed = num_blocks(longest, block) * block
    if engine.kv_tokens < needed:
        raise ValueError(
            f"simulated.kv_tokens{of}: is {engine.kv_tokens}; must be at least {needed}, the "
            f"longest request of the trace ({longest} tokens) in whole blocks of {block} tokens"
        )


def shape_of(config: BatonConfig, engine: SimulatedConfig | None = None) -> Shape:
    """Returns the shape of a worker with the settings of `simulated` and `steps`.

    Args:
        config: The configuration.
        engine: Settings of the worker's engine, instead of the section `simulated`.

    Raises:
        ValueError: a decode step would take no time.
    """
    engine = engine or config.simulated
    model = LatencyModel.from_config(engine).scaled(engine.time_scale)
    if not model.decode_step_s(1, 0):
        raise ValueError(
            "simulated: a decode step takes no time; time_scale, and step_base_ms or "
            "step_per_request_ms, must be above 0"
        )
    return Shape(
        model,
        kv_tokens=engine.kv_tokens,
        block_size_tokens=engine.block_size_tokens,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=engine.max_model_len,
        prefix_caching=engine.prefix_caching,
        host_kv_tokens=engine.host_kv_tokens(config.kv_store.host_bytes),
        kv_bytes_per_token=engine.kv_bytes_per_token,
        host_bytes_per_s=engine.host_bytes_per_s / engine.time_scale,
        network_bytes_per_s=engine.network_bytes_per_s,
        follows_step_targets=config.steps.scheduler == "baton",
    )


def policy_of(
    name: str, scaling: ScalingConfig, arrivals: Sequence[Arrival], shape: Shape
) -> Policy:
    """Returns the policy of this name.

    Raises:
        ValueError: the policy does not exist.
    """
    if name == "baton":
        return Baton(scaling)
    if name == "static":
        return Static(scaling)
    if name == "hpa":
        target = dict(scaling.targets)["interactive"]
        depth = hpa_decode_depth(
            arrivals, shape.model, target.itl_s or math.inf, shape.max_num_seqs, shape.kv_tokens
        )
        return Hpa(scaling, 2.0, depth)
    if name == "planner":
        return Planner(scaling, shape.model, shape.kv_tokens)
    if name == "hindsight":
        sizes = needed_sizes(arrivals, scaling, shape.model, shape.kv_tokens, span_s=_SPAN_S)
        return Hindsight(scaling, sizes, _SPAN_S, scaling.cold_start_s)
    raise ValueError(f"policy is {name!r}; must be one of {', '.join(POLICIES)}")
