"""The autoscaler's part of the configuration."""

from __future__ import annotations

from baton.coordinator.autoscale.types import PoolLimits, ScalingConfig, Targets
from baton.runtime.config import BatonConfig, PoolConfig, PoolLimitsConfig, TargetsConfig


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
    )


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
