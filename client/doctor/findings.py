"""What the doctor says, and its words for numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from baton.runtime.enum_names import enum_name, lane_name, role_name
from baton.v1 import admin_pb2, common_pb2


class Kind(StrEnum):
    """What a finding is about."""

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
    """One thing that is wrong.

    Attributes:
        kind: of a fixed set, for programs.
        what: is slow, in words.
        stage: of a request, where its time goes.
        evidence: numbers, one sentence each.
        first: what to change first.
        weight: how bad it is, beside others; 1 is at the limit.
    """

    kind: Kind
    what: str
    stage: str
    evidence: tuple[str, ...]
    first: str
    weight: float


def more_workers(status: admin_pb2.GetStatusResponse) -> str:
    """Which pool is behind, and how it grows."""
    pools = {pool.role: pool for pool in status.pools}
    decode = pools.get(common_pb2.ROLE_DECODE)
    full = decode is not None and (
        decode.kv_tokens_used >= 0.85 * decode.kv_tokens_total or decode.num_waiting > 0
    )
    role = common_pb2.ROLE_DECODE if full else common_pb2.ROLE_PREFILL
    pool, name = pools.get(role), role_name(role)
    num_serving = pool.num_serving if pool is not None else 0
    if pool is not None and pool.num_starting:
        return (
            f"keep more {name} workers ready (scaling.{name}.min_workers): those that are starting "
            "come too late"
        )
    if pool is not None and pool.max_workers and num_serving >= pool.max_workers:
        return f"raise scaling.{name}.max_workers: the pool is at its ceiling of {pool.max_workers}"
    return f"add a {name} worker: baton scale {name} {num_serving + 1}"


def warm(name: str) -> str:
    return (
        f"keep workers warm (scaling.{name}.min_workers), scale sooner, or make the start shorter "
        "(weights on local disk, a warm compile cache)"
    )


def parts(sums: Mapping[int, int]) -> str:
    total = sum(sums.values()) or 1
    parts = sorted(sums.items(), key=lambda one: -one[1])[:3]
    told = ", ".join(f"{stage_name(stage)} {percent(sum_us / total)}" for stage, sum_us in parts)
    return f"of late first tokens the time went to: {told}"


def share(sums: Mapping[int, int], stages: Iterable[int]) -> float:
    return sum(sums.get(stage, 0) for stage in stages) / (sum(sums.values()) or 1)


def stage_name(stage: int) -> str:
    """As people read it."""
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
