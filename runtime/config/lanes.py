"""The `lanes` and `tenants` sections: order and limits of requests."""

from __future__ import annotations

from pydantic import Field, model_validator

from baton.runtime.section import Count, CountOrZero, PositiveInt, PositiveSeconds, Section
from baton.runtime.ttft_target import TtftTarget, check_slope


class LaneConfig(Section):
    """Admission limits of one lane; null means no limit."""

    max_queued: Count = Field(
        1024,
        description="Requests that wait in this lane's queue. Tenants that have less than their "
        "share of a full queue may add some, up to twice as many of all tenants.",
    )
    max_queue_s: PositiveSeconds = Field(60.0, description="Longest wait in the queue.")
    max_prompt_tokens: PositiveInt | None = Field(None, description="Prompt tokens of one request.")
    max_output_tokens: PositiveInt | None = Field(
        None,
        description="Output tokens of one request; also the default of requests without "
        "max_tokens.",
    )
    max_running: PositiveInt | None = Field(
        None, description="Requests that are dispatched to workers and not finished."
    )
    ttft_ms: Count | None = Field(
        None,
        description="Admission limit, not a target: a request whose first token is predicted to be "
        "later is refused. For requests that name no TTFT target. The lane's target is "
        "scaling.targets.LANE.ttft_ms.",
    )
    ttft_ms_per_1k_tokens: CountOrZero = Field(
        0,
        description="Added to ttft_ms per 1,000 prompt tokens. 0: one limit for all prompts.",
    )

    @model_validator(mode="after")
    def _has_base(self) -> LaneConfig:
        check_slope(self.ttft_ms, self.ttft_ms_per_1k_tokens)
        return self

    @property
    def ttft(self) -> TtftTarget | None:
        """TTFT limit of requests that name no target; None: no limit."""
        return TtftTarget.from_ms(self.ttft_ms, self.ttft_ms_per_1k_tokens)


class InteractiveLaneConfig(LaneConfig):
    """The lane for requests with a user who waits."""

    itl_ms: Count = Field(
        100,
        description="Placement limit, not a target: with strict roles, and for outputs that a flip "
        "moves, the longest step beside interactive requests when a batch request or a prompt "
        "joins them. The target, and the limit in an elastic cell, is "
        "scaling.targets.interactive.itl_ms.",
    )


class BatchLaneConfig(LaneConfig):
    """The lane for background work, which yields to the interactive lane."""

    max_queue_s: PositiveSeconds = Field(600.0, description="Longest wait in the queue.")
    share: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Share of all tokens that the batch lane gets while both lanes have work.",
    )


class LanesConfig(Section):
    """Order of requests: interactive before batch; within a lane, tenants share fairly."""

    interactive: InteractiveLaneConfig = Field(default_factory=InteractiveLaneConfig)
    batch: BatchLaneConfig = Field(default_factory=BatchLaneConfig)
    long_prompt_tokens: int = Field(
        0,
        ge=0,
        description="Interactive prompts with more tokens than this queue in the batch lane. 0: no "
        "limit.",
    )
    prompt_token_weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Weight of a prompt token in the service that is charged to a tenant.",
    )
    output_token_weight: float = Field(
        2.0, gt=0, le=1000, description="Weight of an output token in the same sum."
    )


class TenantConfig(Section):
    """Weight and limits of one tenant; null means no limit."""

    weight: float = Field(
        1.0, ge=0.001, le=1000, description="Weight of the tenant's share relative to others."
    )
    max_concurrent: PositiveInt | None = Field(
        None, description="Requests that are dispatched to workers and not finished."
    )
    tokens_per_s: float | None = Field(
        None, gt=0, le=1e12, description="Rate limit over prompt and output tokens, at admission."
    )
    burst_tokens: PositiveInt | None = Field(
        None,
        description="Tokens that may be admitted at once after a pause. null: ten seconds of "
        "tokens_per_s.",
    )
