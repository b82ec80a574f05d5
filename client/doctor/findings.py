"""Findings of the doctor, and how it formats names and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from baton.runtime.enum_names import enum_name, lane_name, role_name
from baton.v1 import admin_pb2, common_pb2


class Kind(StrEnum):
    """Kind of a finding; a fixed set for programs."""

    NETWORK = "network"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE_INTERFERENCE = "decode_interference"
    BATCH_TOO_LARGE = "batch_too_large"
    ADMISSION = "admission"
    FAIRNESS = "fairness"
    COLD_STARTS = "cold_starts"
    NO_WORKERS = "no_workers"
    RECOVERIES = "recoveries"
    SLOW_HANDOFFS = "slow_handoffs"
    HANDOFF_FALLBACKS = "handoff_fallbacks"
    KV_FULL = "kv_full"
    STAGING_FULL = "staging_full"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a cell.

    Attributes:
        kind: Kind of the problem.
        what: Description of the problem.
        stage: Stage of a request that takes the time.
        evidence: Measurements, one sentence each.
        first: Recommended first change.
        weight: Severity relative to other findings; 1 is at the limit.
    """

    kind: Kind
    what: str
    stage: str
    evidence: tuple[str, ...]
    first: str
    weight: float


def pool_groups(status: admin_pb2.GetStatusResponse) -> list[list[admin_pb2.PoolInfo]]:
    """Returns the pools whose workers do the same work: all pools of an elastic cell, else each."""
    return [list(status.pools)] if status.elastic else [[pool] for pool in status.pools]


def lacks_workers(group: Iterable[admin_pb2.PoolInfo]) -> bool:
    """Whether no worker of a group of pools serves."""
    return all(pool.num_serving == 0 for pool in group)


def needs_first_worker(
    status: admin_pb2.GetStatusResponse, group: Sequence[admin_pb2.PoolInfo]
) -> bool:
    """Whether no worker of a group of pools serves, although one should.

    A pool that sizes itself may have no worker as long as no request waits.
    """
    is_wanted = any(pool.desired or not pool.sizes_itself for pool in group)
    is_queued = any(lane.info.num_queued for lane in status.lanes)
    return bool(group) and lacks_workers(group) and (is_queued or is_wanted)


def add_workers_advice(status: admin_pb2.GetStatusResponse) -> str:
    """Advice to add workers to the pool that is overloaded; in an elastic cell, to any pool."""
    if status.elastic:
        return _add_any_worker_advice(status.pools)
    pools = {pool.role: pool for pool in status.pools}
    decode = pools.get(common_pb2.ROLE_DECODE)
    full = decode is not None and (
        decode.kv_tokens_used >= 0.85 * decode.kv_tokens_total or decode.num_waiting > 0
    )
    role = common_pb2.ROLE_DECODE if full else common_pb2.ROLE_PREFILL
    pool = pools.get(role)
    return add_worker_advice(pool) if pool is not None else f"add a {role_name(role)} worker"


def add_worker_advice(pool: admin_pb2.PoolInfo) -> str:
    """Advice to add a worker to a pool, if workers may be added and none is starting."""
    name = role_name(pool.role)
    if pool.num_starting:
        return (
            f"keep more {name} workers running (scaling.{name}.min_workers): the workers that are "
            "starting will be too late"
        )
    if pool.max_workers and pool.num_serving >= pool.max_workers:
        return f"raise scaling.{name}.max_workers: the pool is at its limit of {pool.max_workers}"
    if pool.max_workers:
        return f"add a {name} worker: baton scale {name} {pool.num_serving + 1}"
    # A coordinator that starts no workers refuses `baton scale`.
    return f"add a {name} worker: baton worker --role {name}"


def _add_any_worker_advice(pools: Sequence[admin_pb2.PoolInfo]) -> str:
    """Advice to add a worker to a cell in which any worker does any work."""
    if any(pool.num_starting for pool in pools):
        return (
            "keep more workers running (scaling.prefill.min_workers, scaling.decode.min_workers): "
            "the workers that are starting will be too late"
        )
    sized = [pool for pool in pools if pool.max_workers]
    if not sized:
        # A coordinator that starts no workers refuses `baton scale`.
        return "add a worker: baton worker --role decode (or prefill: any worker does any work)"
    growing = [pool for pool in sized if pool.num_serving < pool.max_workers]
    if not growing:
        return (
            "raise scaling.prefill.max_workers or scaling.decode.max_workers: both pools are at "
            "their limits"
        )
    pool = min(growing, key=lambda one: one.num_serving)
    return f"add a worker: baton scale {role_name(pool.role)} {pool.num_serving + 1}"


def keep_warm_advice(name: str) -> str:
    """Advice against cold starts of a pool."""
    return (
        f"keep more workers running (scaling.{name}.min_workers), scale sooner, or make the start "
        "shorter (weights on local disk, a warm compile cache)"
    )


def stage_breakdown(sums: Mapping[int, int]) -> str:
    """The three stages that took the most time of late first tokens."""
    total = sum(sums.values()) or 1
    parts = sorted(sums.items(), key=lambda one: -one[1])[:3]
    listed = ", ".join(f"{stage_name(stage)} {percent(sum_us / total)}" for stage, sum_us in parts)
    return f"time of late first tokens by stage: {listed}"


def stage_share(sums: Mapping[int, int], stages: Iterable[int]) -> float:
    """Share of the time that some stages took, from 0 to 1."""
    return sum(sums.get(stage, 0) for stage in stages) / (sum(sums.values()) or 1)


def stage_name(stage: int) -> str:
    """Name of a stage for people: "prefill queue"."""
    return enum_name(common_pb2.Stage.DESCRIPTOR, stage).replace("_", " ")


def lane_of(lane: admin_pb2.LaneStatus) -> str:
    return lane_name(lane.info.lane)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share < 0.995 else f"{100 * share:.1f} %"


def ms(microseconds: int) -> str:
    value_ms = microseconds / 1e3
    if value_ms >= 10_000:
        return f"{value_ms / 1e3:.1f} s"
    return f"{value_ms:.0f} ms" if value_ms >= 10 else f"{value_ms:.1f} ms"
