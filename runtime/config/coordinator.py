"""The coordinator's own section, and what it assumes of workers."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from baton.runtime.section import PositiveInt, PositiveSeconds, Section


class CoordinatorConfig(Section):
    """Where the coordinator listens, and what it lets in."""

    listen: str = Field("127.0.0.1:7070", description="host:port of gRPC; port 0 picks a free one")
    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; port 0 picks a free one"
    )
    max_running_requests: PositiveInt = Field(4096, description="admitted and not ended")
    max_requests_per_session: PositiveInt = Field(
        4096, description="admitted and not ended, of one session"
    )
    max_prompt_bytes: PositiveInt = Field(4 * 2**20, description="text or token ids of one prompt")
    max_stop_strings: PositiveInt = Field(16, description="of one request")
    max_stop_string_chars: PositiveInt = Field(256, description="of one stop string or bad word")
    max_logprobs: int = Field(20, ge=0, description="likeliest tokens told beside the chosen one")
    max_request_s: PositiveSeconds = Field(3600, description="longest life of a request")
    heartbeat_s: PositiveSeconds = Field(0.5, description="of the workers' streams")
    worker_silent_s: PositiveSeconds = Field(
        1.5,
        validate_default=True,
        description="the requests of a worker silent for so long go on elsewhere; of one that has "
        "been punctual lately after twice its longest silence, two thirds of this at least",
    )
    worker_timeout_s: PositiveSeconds = Field(
        10.0, validate_default=True, description="a worker silent for so long is lost"
    )
    worker_stuck_s: PositiveSeconds = Field(
        20.0,
        description="the requests of a worker whose engine makes no step for so long, and for as "
        "long as four of its longest are predicted to take, go on elsewhere; after three times as "
        "long it is lost",
    )
    max_recovery_s: PositiveSeconds = Field(
        30.0, description="longest wait for another worker of a request whose worker was lost"
    )
    max_lost_attempts: PositiveInt = Field(
        4, description="a request fails after so many attempts in a row without a new token"
    )
    adoption_grace_s: PositiveSeconds = Field(
        30.0, description="how long workers go on without a coordinator"
    )
    handoff_timeout_s: PositiveSeconds = Field(
        10.0, description="how long a decode worker waits for a commit before it recomputes"
    )
    drain_timeout_s: PositiveSeconds = Field(30.0, description="Ctrl-C: longest wait for requests")

    @field_validator("worker_silent_s")
    @classmethod
    def _heartbeats_fit(cls, silent_s: float, info: ValidationInfo) -> float:
        """A healthy worker, heard once per heartbeat, must not be given up for one that is late."""
        least_s = 2 * info.data.get("heartbeat_s", 0.0)
        if silent_s < least_s:
            raise ValueError(f"must be at least twice heartbeat_s, {least_s:g}")
        return silent_s

    @field_validator("worker_timeout_s")
    @classmethod
    def _is_no_sooner(cls, timeout_s: float, info: ValidationInfo) -> float:
        least_s = info.data.get("worker_silent_s", 0.0)
        if timeout_s < least_s:
            raise ValueError(f"must be at least worker_silent_s, {least_s:g}")
        return timeout_s


class LatencyConfig(Section):
    """What steps cost on a worker that nobody has measured: the latency model's seed, in ms.

    The defaults are about an 8B model on a small GPU; the fit to what workers report replaces them.
    """

    prefill_base_ms: float = Field(10.0, ge=0, allow_inf_nan=False, description="per step")
    prefill_per_token_ms: float = Field(
        0.1, ge=0, allow_inf_nan=False, description="of a prompt, after what is cached"
    )
    prefill_per_token_squared_ms: float = Field(
        2e-6, ge=0, allow_inf_nan=False, description="the same, times its tokens again"
    )
    step_base_ms: float = Field(15.0, ge=0, allow_inf_nan=False, description="per decode step")
    step_per_request_ms: float = Field(
        0.05, ge=0, allow_inf_nan=False, description="and request in it"
    )
    step_per_kv_token_ms: float = Field(
        2e-4, ge=0, allow_inf_nan=False, description="and KV token of these requests"
    )
