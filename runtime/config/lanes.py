"""Sections on who goes first: lanes and tenants."""

from __future__ import annotations

from pydantic import Field

from baton.runtime.section import Count, PositiveInt, PositiveSeconds, Section


class LaneConfig(Section):
    """What one lane lets in; null is no limit."""

    max_queued: Count = Field(1024, description="requests that wait")
    max_queue_s: PositiveSeconds = Field(60.0, description="longest wait for a worker")
    max_prompt_tokens: PositiveInt | None = Field(None, description="of one request")
    max_output_tokens: PositiveInt | None = Field(
        None, description="of one request; also what one gets that names no max_tokens"
    )
    max_running: PositiveInt | None = Field(None, description="dispatched and not ended")
    ttft_ms: Count | None = Field(
        None,
        description="time to first token wanted of requests that name none; one that is predicted "
        "to take longer is not admitted",
    )


class InteractiveLaneConfig(LaneConfig):
    """The lane of people who wait."""

    itl_ms: Count = Field(
        100,
        description="inter-token latency wanted; batch outputs beside interactive ones yield to it",
    )


class BatchLaneConfig(LaneConfig):
    """The lane that yields."""

    max_queue_s: PositiveSeconds = Field(600.0, description="longest wait for a worker")
    share: float = Field(
        0.05, ge=0, lt=1, description="of the tokens served, while both lanes have work to start"
    )


class LanesConfig(Section):
    """The order of requests: interactive first, then batch; inside a lane tenants share fairly."""

    interactive: InteractiveLaneConfig = Field(default_factory=InteractiveLaneConfig)
    batch: BatchLaneConfig = Field(default_factory=BatchLaneConfig)
    long_prompt_tokens: int = Field(
        0, ge=0, description="interactive prompts longer than this queue with batch; 0: none does"
    )
    prompt_token_weight: float = Field(
        1.0, gt=0, le=1000, description="of a prompt token in what a tenant was served"
    )
    output_token_weight: float = Field(2.0, gt=0, le=1000, description="of an output token there")


class TenantConfig(Section):
    """What one tenant gets; null is no limit."""

    weight: float = Field(1.0, ge=0.001, le=1000, description="of its share beside others'")
    max_concurrent: PositiveInt | None = Field(None, description="dispatched and not ended")
    tokens_per_s: float | None = Field(
        None, gt=0, le=1e12, description="prompt and output, admitted over time"
    )
    burst_tokens: PositiveInt | None = Field(
        None, description="at once, after a pause; null: what ten seconds bring"
    )
