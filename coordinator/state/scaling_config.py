"""The autoscaler's part of the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from baton.coordinator.state.pools import Pool
from baton.runtime.config import (
    BatonConfig,
    PoolConfig,
    PoolLimitsConfig,
    TargetsConfig,
)
from baton.runtime.config_error import ConfigError
from baton.runtime.ttft_target import TtftTarget

# Shortest stabilisation window, and how long a load must be known before a pool may shrink. Loads
# change within a minute and are averaged over two.
_LEAST_WINDOW_S, _YOUNG_S = 60.0, 120.0
# Default stabilisation window in cold starts.
_COLD_STARTS = 5.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of one lane. None: no target, so the lane never makes a pool grow.

    Attributes:
        ttft_s: Longest time to first token, in seconds.
        ttft_s_per_1k_tokens: Seconds added to ttft_s per 1,000 prompt tokens; see `ttft`.
        itl_s: Longest time between two tokens, in seconds.
        percentile: Percentage of requests and tokens that must meet the targets.
    """

    ttft_s: float | None = 0.5
    itl_s: float | None = 0.05
    percentile: float = 95.0
    ttft_s_per_1k_tokens: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"targets.{name} is {value}; must be more than 0, or null")
        slope = self.ttft_s_per_1k_tokens
        if not 0 <= slope < math.inf or (slope and self.ttft_s is None):
            raise ValueError(
                f"targets.ttft_s_per_1k_tokens is {slope}; must be finite and at least 0, and 0 if "
                "ttft_s is null"
            )
        if not 0 < self.percentile < 100:
            raise ValueError(f"targets.percentile is {self.percentile}; must be between 0 and 100")

    @property
    def ttft(self) -> TtftTarget | None:
        """Target of the time to first token; None: no target."""
        if self.ttft_s is None:
            return None
        return TtftTarget(self.ttft_s, self.ttft_s_per_1k_tokens)

    @property
    def may_miss(self) -> float:
        """Share of requests and tokens that may miss the targets."""
        return 1 - self.percentile / 100


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Limits of one pool.

    Attributes:
        floor: Least number of workers.
        ceiling: Largest number of workers.
        gpus: Number of GPUs of one worker.
        stages: Number of pipeline stages of one worker.
    """

    floor: int = 1
    ceiling: int = 64
    gpus: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.ceiling:
            raise ValueError(
                f"floor is {self.floor} and ceiling {self.ceiling}; must be 0 <= floor <= ceiling"
            )
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; must be at least 1")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Configuration of the autoscaler. Times are in seconds.

    Attributes:
        targets: Latency targets by name of the lane.
        prefill, decode: Limits of the pools.
        max_gpus: Most GPUs of both pools, including workers that start or drain; None: no limit.
        interval_s: Time between two decisions.
        cold_start_s: Time until a started worker serves. The load is forecast this far ahead.
        start_timeout_s: A worker that has been starting for longer is stuck and does not count; a
            worker that flips has its own limit, `drain_s`.
        down_window_s: A pool shrinks only to the largest size needed within this time; None: see
            `window_s`.
        max_up, max_down: Largest growth factor and largest shrunk share of a pool per decision;
            one worker is always allowed.
        flip: Whether a worker may change its role.
        flip_quiet_s: Shortest time between a flip and a flip back.
        idle_s: A pool with floor 0 shrinks to 0 after this time without a request.
    """

    targets: tuple[tuple[str, Targets], ...] = (("interactive", Targets()),)
    prefill: PoolLimits = field(default_factory=PoolLimits)
    decode: PoolLimits = field(default_factory=PoolLimits)
    max_gpus: int | None = None
    interval_s: float = 5.0
    cold_start_s: float = 60.0
    start_timeout_s: float = 600.0
    down_window_s: float | None = None
    max_up: float = 2.0
    max_down: float = 0.25
    flip: bool = True
    flip_quiet_s: float = 120.0
    idle_s: float = 300.0

    @property
    def window_s(self) -> float:
        """How long a worker is kept that is not needed, in seconds.

        The default is several cold starts, at least a minute. Bursts often come again after some
        minutes, and the requests of a burst that finds too few workers wait for a cold start.
        """
        if self.down_window_s is not None:
            return self.down_window_s
        return max(_LEAST_WINDOW_S, _COLD_STARTS * self.cold_start_s)

    @property
    def young_s(self) -> float:
        """How long a load must be known before a pool may shrink, in seconds.

        In the beginning only short requests have ended, so the load looks smaller than it is.
        """
        return _YOUNG_S if self.down_window_s is None else min(_YOUNG_S, self.down_window_s)

    def with_targets(self, targets: Mapping[str, Targets]) -> ScalingConfig:
        """Returns the configuration with these targets by lane."""
        return replace(self, targets=tuple(targets.items()))

    def limits(self, pool: Pool) -> PoolLimits:
        return self.prefill if pool is Pool.PREFILL else self.decode


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """The scaling configuration of the coordinator's core.

    Attributes:
        config: Limits, targets and times of the autoscaler.
        autoscale: Whether autoscaling is on at the start.
        drain_s: How long a worker that drains or flips may take to finish its requests.
    """

    config: ScalingConfig = field(default_factory=ScalingConfig)
    autoscale: bool = False
    drain_s: float = 30.0

    @classmethod
    def of(cls, config: BatonConfig) -> ScalingSettings:
        return cls(scaling_config(config), config.scaling.autoscale, config.worker.drain_timeout_s)


def scaling_config(config: BatonConfig) -> ScalingConfig:
    """Returns the autoscaler's part of a configuration."""
    scaling = config.scaling
    return ScalingConfig(
        targets=(
            ("interactive", in_seconds(scaling.targets.interactive)),
            ("batch", in_seconds(scaling.targets.batch)),
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


def in_seconds(targets: TargetsConfig) -> Targets:
    """Returns a lane's configured targets."""
    return Targets(
        ttft_s=targets.ttft_ms / 1e3 if targets.ttft_ms is not None else None,
        itl_s=targets.itl_ms / 1e3 if targets.itl_ms is not None else None,
        percentile=targets.percentile,
        ttft_s_per_1k_tokens=targets.ttft_ms_per_1k_tokens / 1e3,
    )


def check_sizes(config: BatonConfig) -> None:
    """Raises ConfigError for pool sizes of `baton up` that are over the scaling limits."""
    check_limits(config, "scaling.autoscale is on" if config.scaling.autoscale else None)


def check_limits(config: BatonConfig, sized_because: str | None) -> None:
    """Raises ConfigError for pool sizes that are over the scaling limits.

    Args:
        config: The configuration.
        sized_because: Why the load sizes the pools, for the message; None: the sizes are fixed, so
            only `scaling.max_gpus` limits them.
    """
    scaling = scaling_config(config)
    sizes = {Pool.PREFILL: config.prefill.workers, Pool.DECODE: config.decode.workers}
    for pool, workers in sizes.items():
        most = scaling.limits(pool).ceiling
        if sized_because is not None and workers > most:
            raise ConfigError(
                f"{pool.value}.workers: is {workers}; must be at most {most}, "
                f"scaling.{pool.value}.max_workers, because {sized_because}"
            )
    needed = sum(workers * scaling.limits(pool).gpus for pool, workers in sizes.items())
    if scaling.max_gpus is not None and needed > scaling.max_gpus:
        raise ConfigError(
            f"scaling.max_gpus: is {scaling.max_gpus}; must be at least {needed}, the "
            "GPUs of prefill.workers and decode.workers"
        )


def _limits(config: BatonConfig, pool: PoolConfig, limits: PoolLimitsConfig) -> PoolLimits:
    # vLLM itself reports wrong sizes.
    if not (gpus := config.num_ranks(pool)):
        return PoolLimits(limits.min_workers, limits.max_workers)
    stages = config.pipeline_parallel_size(pool)
    return PoolLimits(limits.min_workers, limits.max_workers, gpus, stages)
