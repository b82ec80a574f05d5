"""The `coordinator` section, and the `latency` section with the prior of the latency model."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, field_validator

from baton.runtime.section import PositiveInt, PositiveSeconds, Section


class CoordinatorConfig(Section):
    """Listen addresses, admission limits and timeouts of the coordinator."""

    listen: str = Field(
        "127.0.0.1:7070", description="host:port of the gRPC server; port 0 picks a free one."
    )
    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; port 0 picks a free one."
    )
    max_running_requests: PositiveInt = Field(
        4096,
        description="Requests that wait or run, in all lanes; further ones are refused. Batch "
        "requests leave lanes.interactive.max_queued of these places free, at most half of them.",
    )
    max_requests_per_session: PositiveInt = Field(
        4096, description="Requests of one session that are admitted and not finished."
    )
    max_prompt_bytes: PositiveInt = Field(
        4 * 2**20, description="Size of one prompt's text or token IDs."
    )
    max_stop_strings: PositiveInt = Field(16, description="Stop strings of one request.")
    max_stop_string_chars: PositiveInt = Field(
        256, description="Characters of one stop string or bad word."
    )
    max_logprobs: int = Field(
        20, ge=0, description="Most likely tokens reported per position, beside the chosen token."
    )
    max_request_s: PositiveSeconds = Field(
        3600, description="A request that takes longer than this is ended."
    )
    heartbeat_s: PositiveSeconds = Field(
        0.5, description="Interval of heartbeats on the workers' streams."
    )
    worker_silent_s: PositiveSeconds = Field(
        1.5,
        validate_default=True,
        description="The requests of a worker without a message for this long continue on other "
        "workers. For a worker without long silences lately, the limit is twice its longest "
        "recent silence, but at least two thirds of this value.",
    )
    worker_timeout_s: PositiveSeconds = Field(
        10.0,
        validate_default=True,
        description="A worker without a message for this long is removed from the cluster.",
    )
    worker_stuck_s: PositiveSeconds = Field(
        20.0,
        description="The requests of a worker whose engine finishes no step for this long, and for "
        "longer than its four longest steps are predicted to take, continue on other workers. "
        "After three times as long, the worker is removed from the cluster.",
    )
    max_recovery_s: PositiveSeconds = Field(
        30.0,
        description="Longest time that a request whose worker died waits for another worker.",
    )
    max_lost_attempts: PositiveInt = Field(
        4,
        description="A request fails after this many attempts in a row without a new token.",
    )
    adoption_grace_s: PositiveSeconds = Field(
        30.0,
        description="Workers without a coordinator keep their requests for this long, and requests "
        "of gateways wait as long for the next one, at least 30 s.",
    )
    handoff_timeout_s: PositiveSeconds = Field(
        10.0,
        description="A decode worker waits this long for a handoff to commit, then recomputes the "
        "prompt.",
    )
    drain_timeout_s: PositiveSeconds = Field(
        30.0, description="On Ctrl-C or SIGTERM: longest wait for running requests."
    )

    @field_validator("worker_silent_s")
    @classmethod
    def _heartbeats_fit(cls, silent_s: float, info: ValidationInfo) -> float:
        """Rejects values at which one late heartbeat would mark a healthy worker as silent."""
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
    """Prior of the latency model: cost of steps on a worker without measurements, in ms.

    The defaults suit an 8B model on a small GPU. The fit to the steps that workers report replaces
    them.
    """

    prefill_base_ms: float = Field(10.0, ge=0, description="Cost per step that has prompt tokens.")
    prefill_per_token_ms: float = Field(
        0.1, ge=0, description="Cost per prompt token that is not cached."
    )
    prefill_per_token_squared_ms: float = Field(
        2e-6,
        ge=0,
        description="Cost per squared number of a prompt's tokens that are not cached.",
    )
    step_base_ms: float = Field(15.0, ge=0, description="Cost per decode step.")
    step_per_request_ms: float = Field(0.05, ge=0, description="Cost per request in a decode step.")
    step_per_kv_token_ms: float = Field(
        2e-4, ge=0, description="Cost per KV token of the decoding requests."
    )
    mixed_base_ms: float | None = Field(
        None,
        ge=0,
        description="Cost per step that has prompt tokens and decodes; null: the larger of "
        "prefill_base_ms and step_base_ms.",
    )
