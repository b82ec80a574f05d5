"""The autoscaler's part of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.coordinator.state.pools import Pool
from baton.runtime.config import (
    BatonConfig,
    LaneTargetsConfig,
    PoolConfig,
    PoolLimitsConfig,
    TargetsConfig,
)

# Loads come and go within a minute, and are averaged over two.
_LEAST_WINDOW_S, _YOUNG_S = 60.0, 120.0


@dataclass(frozen=True, slots=True)
class Targets:
    """What a lane is promised; None: nothing, so that it never makes a pool grow.

    Attributes:
        ttft_s: time to first token, at most.
        itl_s: seconds between two tokens, at most.
        percentile: of requests and tokens that these hold for.
    """

    ttft_s: float | None = 0.5
    itl_s: float | None = 0.05
    percentile: float = 95.0

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"targets.{name} is {value}; must be more than 0, or null")
        if not 0 < self.percentile < 100:
            raise ValueError(f"targets.percentile is {self.percentile}; must be between 0 and 100")

    @property
    def may_miss(self) -> float:
        """The share that may be later."""
        return 1 - self.percentile / 100


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Attributes: floor, ceiling: workers; gpus: of one worker."""

    floor: int = 1
    ceiling: int = 64
    gpus: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= self.ceiling:
            raise ValueError(
                f"floor is {self.floor} and ceiling {self.ceiling}; must be 0 <= floor <= ceiling"
            )
        if self.gpus < 1:
            raise ValueError(f"gpus is {self.gpus}; must be at least 1")


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Times in seconds.

    Attributes:
        targets: by lane's name.
        prefill, decode: limits of the pools.
        max_gpus: of both pools together, workers that start or drain included; None: no limit.
        interval_s: between two decisions.
        cold_start_s: until a started worker serves: how far ahead the load is forecast.
        start_timeout_s: a worker that starts for longer is stuck and counts no more.
        down_window_s: a pool shrinks to the most that was wanted within this time; None: see
            `window_s`.
        max_up, max_down: factor up and share down of a pool in one decision; one worker always.
        flip: whether a worker may change roles.
        flip_quiet_s: between a flip and one back.
        idle_s: without a request for so long a pool with floor 0 goes to zero.
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
        """How long a worker that is not needed is kept, where that is not configured.

        As long as it is paid for while it starts again, at least a minute: whenever it will be
        needed next, that costs at most twice what the best choice would have (Karlin et al.,
        Competitive Snoopy Caching, 1988, on renting or buying).
        """
        if self.down_window_s is not None:
            return self.down_window_s
        return max(_LEAST_WINDOW_S, self.cold_start_s)

    @property
    def young_s(self) -> float:
        """A load that has been known for less takes no worker away.

        Of requests that last long the first have hardly ended, and the short ones among them first.
        """
        return _YOUNG_S if self.down_window_s is None else min(_YOUNG_S, self.down_window_s)

    def limits(self, pool: Pool) -> PoolLimits:
        return self.prefill if pool is Pool.PREFILL else self.decode


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
