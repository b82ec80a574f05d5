"""The section on the sizes of the pools."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.runtime.section import Count, NumWorkers, PositiveInt, PositiveSeconds, Section


class TargetsConfig(Section):
    """What pools are sized for; null is no promise, and makes no pool grow."""

    ttft_ms: Count | None = Field(500, description="time to first token")
    itl_ms: Count | None = Field(50, description="inter-token latency")
    percentile: float = Field(95.0, gt=0, lt=100, description="of requests and tokens")


class NoTargetsConfig(TargetsConfig):
    """Of work that can wait: it promises nothing unless told."""

    ttft_ms: Count | None = Field(None, description="time to first token")
    itl_ms: Count | None = Field(None, description="inter-token latency")


class LaneTargetsConfig(Section):
    """Targets by lane."""

    interactive: TargetsConfig = Field(default_factory=TargetsConfig)
    batch: NoTargetsConfig = Field(default_factory=NoTargetsConfig)


class PoolLimitsConfig(Section):
    """How many workers a pool may have."""

    min_workers: NumWorkers = Field(1, description="0: an idle pool may end its last")
    max_workers: NumWorkers = Field(16, ge=1, description="of a pool sized by load or by hand")

    @model_validator(mode="after")
    def _are_ordered(self) -> PoolLimitsConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}; must be at most max_workers, "
                f"{self.max_workers}"
            )
        return self


class ScalingSection(Section):
    """How the pools size themselves."""

    autoscale: bool = Field(
        False,
        description="whether baton up changes the pools' sizes by itself; off, they have workers",
    )
    targets: LaneTargetsConfig = Field(default_factory=LaneTargetsConfig)
    prefill: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    decode: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    max_gpus: PositiveInt | None = Field(None, description="of both pools together; null: no limit")
    interval_s: PositiveSeconds = Field(5.0, description="between two decisions")
    cold_start_s: PositiveSeconds = Field(
        60.0, description="until a started worker serves: the load is forecast so far ahead"
    )
    start_timeout_s: PositiveSeconds = Field(
        600.0, description="a worker that starts for longer is given up"
    )
    down_window_s: float | None = Field(
        None,
        ge=0,
        description="a pool shrinks to the most it needed within this time; null: cold_start_s, "
        "at least 60",
    )
    idle_s: PositiveSeconds = Field(
        300.0, description="without a request for so long a pool with min_workers 0 ends its last"
    )
    flip: bool = Field(True, description="whether workers may change roles")
    flip_quiet_s: float = Field(120.0, ge=0, description="between a flip and one back")
