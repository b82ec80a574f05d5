"""Sections on workers: their pools, their processes, their handoffs, and the simulated engine."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from baton.runtime.names import FIRST_REVISION, REVISION_NAMES, is_revision
from baton.runtime.section import Count, NumWorkers, PositiveInt, PositiveSeconds, Section


class PoolConfig(Section):
    """One pool's workers."""

    workers: NumWorkers = Field(1, description="that baton up starts")
    max_requests_per_worker: PositiveInt = Field(
        256,
        description="dispatched to one worker at a time; decodes no more than its engine runs",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="for this pool, over the common engine_args"
    )


class DecodePoolConfig(PoolConfig):
    """The workers that decode."""

    local_prefill: bool = Field(
        True,
        description="whether a decode worker may compute a prompt itself where that is much sooner "
        "than a prefill worker would, and within itl_ms but for a few gaps",
    )


class WorkerConfig(Section):
    """A worker process."""

    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; port 0 picks a free one"
    )
    drain_timeout_s: PositiveSeconds = Field(30.0, description="SIGTERM: longest wait")
    start_timeout_s: PositiveSeconds = Field(600.0, description="longest load of the model")
    attach_timeout_s: PositiveSeconds = Field(
        30.0, description="a worker that finds no coordinator for so long ends"
    )
    labels: dict[str, str] = Field(
        default_factory=dict, description="shown by baton workers --json, beside those it adds"
    )
    revision: str = Field(
        FIRST_REVISION,
        description="names model and engine arguments together; requests stay on workers of one. "
        "The coordinator's own is the stable one, which gets what no rollout takes",
    )

    @field_validator("revision")
    @classmethod
    def _is_revision(cls, value: str) -> str:
        if not is_revision(value):
            raise ValueError(f"must be {REVISION_NAMES}")
        return value


class SimulatedConfig(Section):
    """The simulated engine's timing: milliseconds from the latency model, times `time_scale`."""

    time_scale: float = Field(1.0, ge=0, description="0 answers at once")
    prefill_base_ms: float = Field(5.0, ge=0, description="per step with prompts in it")
    prefill_per_token_ms: float = Field(0.05, ge=0, description="of a prompt, after what is cached")
    prefill_per_token_squared_ms: float = Field(
        0.0, ge=0, description="the same, times its tokens again"
    )
    step_base_ms: float = Field(8.0, ge=0, description="per decode step")
    step_per_request_ms: float = Field(0.2, ge=0, description="and request in it")
    step_per_kv_token_ms: float = Field(0.0, ge=0, description="and KV token of these requests")
    max_model_len: Count = Field(8192, description="context, in tokens")
    kv_tokens: Count = Field(65536, description="that the KV cache holds")
    block_size_tokens: Count = Field(16, description="of one KV block")
    prefix_caching: bool = Field(True, description="keep finished blocks for equal prefixes")
    num_layers: Count = Field(4, description="that a handoff moves")
    block_bytes: Count = Field(1024, ge=64, description="of one block of one layer")
    max_num_seqs: Count = Field(64, description="requests in one step")
    max_num_batched_tokens: Count = Field(2048, description="tokens in one step")
