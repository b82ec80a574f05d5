"""The autoscaler's part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.coordinator.scaling.autoscale.types import PoolLimits, ScalingConfig, Targets
from baton.runtime.config import (
    BatonConfig,
    LaneTargetsConfig,
    PoolConfig,
    PoolLimitsConfig,
    TargetsConfig,
)


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """What the coordinator's core is told of scaling.

    Attributes:
        config: limits, targets and times of the autoscaler.
        autoscale: whether the pools size themselves from the beginning.
        drain_s: how long a worker that leaves, or changes its role, may take to finish what it has.
    """

    config: ScalingConfig = field(default_factory=ScalingConfig)
    autoscale: bool = False
    drain_s: float = 30.0

    @classmethod
    def of(cls, config: BatonConfig) -> ScalingSettings:
        return cls(scaling_config(config), config.scaling.autoscale, config.worker.drain_timeout_s)


def scaling_config(config: BatonConfig) -> ScalingConfig:
    """As the autoscaler wants it."""
    scaling = config.scaling
    return ScalingConfig(
        targets=(
            ("interactive", _targets(scaling.targets.interactive)),
            ("batch", _targets(scaling.targets.batch)),
        ),
        prefill=_limits(config, config.prefill, scaling.prefill),
        decode=_limits(config, config.decode, scaling.decode),
        max_gpus=scaling.max_gpus,
        interval_s=scaling.interval_s,
        cold_start_s=scaling.cold_start_s,
        start_timeout_s=scaling.start_timeout_s,
        down_window_s=scaling.down_window_s,
        flip=scaling.flip,
        flip_quiet_s=scaling.flip_quiet_s,
        idle_s=scaling.idle_s,
    )


def in_config(targets: Mapping[str, Targets]) -> LaneTargetsConfig:
    """Targets by lane, as a configuration names them."""
    return LaneTargetsConfig.model_validate(
        {
            lane: {
                "ttft_ms": _milliseconds(one.ttft_s),
                "itl_ms": _milliseconds(one.itl_s),
                "percentile": one.percentile,
            }
            for lane, one in targets.items()
        }
    )


def _milliseconds(seconds: float | None) -> int | None:
    return max(1, round(seconds * 1e3)) if seconds is not None else None


def _targets(targets: TargetsConfig) -> Targets:
    return Targets(
        ttft_s=targets.ttft_ms / 1e3 if targets.ttft_ms is not None else None,
        itl_s=targets.itl_ms / 1e3 if targets.itl_ms is not None else None,
        percentile=targets.percentile,
    )


def _limits(config: BatonConfig, pool: PoolConfig, limits: PoolLimitsConfig) -> PoolLimits:
    size = config.tensor_parallel_size(pool)
    return PoolLimits(
        limits.min_workers, limits.max_workers, size if isinstance(size, int) and size > 0 else 1
    )
