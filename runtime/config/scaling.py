"""The `scaling` section: latency targets and sizes of the pools."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from baton.runtime.section import (
    MAX_WORKERS,
    Count,
    CountOrZero,
    NumWorkers,
    PositiveInt,
    PositiveSeconds,
    Section,
)
from baton.runtime.ttft_target import TtftTarget, check_slope

_TTFT = (
    "Target of the time to first token. It refuses no request: the limit of admission is "
    "lanes.LANE.ttft_ms."
)
_ITL = (
    "Target of the inter-token latency. With strict roles, lanes.interactive.itl_ms limits where "
    "requests are placed instead."
)
_PER_1K = (
    "Added to ttft_ms per 1,000 prompt tokens, so that the target of a request grows with its "
    "prompt. 0: one target for all prompts."
)


class TargetsConfig(Section):
    """Latency targets of a lane; null means no target.

    docs/configuration.md ("Latency targets and limits") says what they decide, and how the limits
    `lanes.LANE.ttft_ms` and `lanes.interactive.itl_ms` differ.
    """

    ttft_ms: Count | None = Field(500, description=_TTFT)
    ttft_ms_per_1k_tokens: CountOrZero = Field(0, description=_PER_1K)
    itl_ms: Count | None = Field(50, description=_ITL)
    percentile: float = Field(
        95.0,
        gt=0,
        lt=100,
        description="Percentage of requests and tokens that must meet the target.",
    )

    @model_validator(mode="after")
    def _has_base(self) -> TargetsConfig:
        check_slope(self.ttft_ms, self.ttft_ms_per_1k_tokens)
        return self

    @property
    def ttft(self) -> TtftTarget | None:
        """Target of the time to first token; None: no target."""
        return TtftTarget.from_ms(self.ttft_ms, self.ttft_ms_per_1k_tokens)


class NoTargetsConfig(TargetsConfig):
    """Targets of the batch lane: none by default."""

    ttft_ms: Count | None = Field(None, description=_TTFT)
    itl_ms: Count | None = Field(None, description=_ITL)


class LaneTargetsConfig(Section):
    """Latency targets per lane."""

    interactive: TargetsConfig = Field(default_factory=TargetsConfig)
    batch: NoTargetsConfig = Field(default_factory=NoTargetsConfig)


class PoolLimitsConfig(Section):
    """Smallest and largest number of workers of a pool."""

    min_workers: NumWorkers = Field(
        1, description="Smallest pool size. 0: an idle pool may end its last worker."
    )
    max_workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] = Field(
        16, description="Largest pool size, for the autoscaler and for manual changes."
    )

    @model_validator(mode="after")
    def _are_ordered(self) -> PoolLimitsConfig:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers is {self.min_workers}; must be at most max_workers, "
                f"{self.max_workers}"
            )
        return self


class ScalingSection(Section):
    """Autoscaling of the pools, and limits of their sizes."""

    autoscale: bool = Field(
        False,
        description="Whether baton up changes the pools' sizes by load. Off: each pool has its "
        "configured number of workers.",
    )
    targets: LaneTargetsConfig = Field(default_factory=LaneTargetsConfig)
    prefill: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    decode: PoolLimitsConfig = Field(default_factory=PoolLimitsConfig)
    max_gpus: PositiveInt | None = Field(
        None, description="GPUs of both pools together. null: no limit."
    )
    interval_s: PositiveSeconds = Field(5.0, description="Time between two scaling decisions.")
    cold_start_s: PositiveSeconds = Field(
        60.0,
        description="Time from a worker's start until it serves; the load is forecast this far "
        "ahead.",
    )
    start_timeout_s: PositiveSeconds = Field(
        600.0, description="A worker that is not ready after this time is given up."
    )
    down_window_s: float | None = Field(
        None,
        ge=0,
        description="A pool shrinks to the largest size it needed within this time. null: "
        "5 times cold_start_s, at least 60.",
    )
    idle_s: PositiveSeconds = Field(
        300.0,
        description="A pool with min_workers 0 ends its last worker after this long without a "
        "request.",
    )
    flip: bool = Field(
        True,
        description="Whether workers may change their role between prefill and decode. With "
        "workers of one kind, an elastic cell does so only if limits or sizes set by hand make one "
        "pool grow and the other shrink.",
    )
    flip_quiet_s: float = Field(
        120.0, ge=0, description="Shortest time between a role change and the change back."
    )
