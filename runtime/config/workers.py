"""Sections for workers: pools, worker processes and the simulated engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from baton.runtime.names import FIRST_REVISION, REVISION_NAMES, is_revision
from baton.runtime.section import (
    MAX_COUNT,
    Count,
    NumWorkers,
    PositiveInt,
    PositiveSeconds,
    Section,
)


class PoolConfig(Section):
    """Workers of one pool."""

    workers: NumWorkers = Field(1, description="Number of workers that baton up starts.")
    max_requests_per_worker: PositiveInt = Field(
        256,
        description="Requests dispatched to one worker at a time; a decode worker gets no more "
        "than its engine runs at once.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's engine arguments for this pool; they override the common engine_args.",
    )


class DecodePoolConfig(PoolConfig):
    """Workers of the decode pool."""

    local_prefill: bool = Field(
        True,
        description="Whether a decode worker may compute a prompt itself, when that is much faster "
        "than a prefill worker and delays the inter-token latency beyond "
        "lanes.interactive.itl_ms only for a few tokens. For strict roles; false makes a cell "
        "strict unless elastic is true.",
    )


class WorkerConfig(Section):
    """Settings of a worker process."""

    metrics_listen: str = Field(
        "127.0.0.1:0", description="host:port of the Prometheus endpoint; port 0 picks a free one."
    )
    drain_timeout_s: PositiveSeconds = Field(
        30.0, description="On SIGTERM: longest wait for running requests."
    )
    start_timeout_s: PositiveSeconds = Field(600.0, description="Longest time to load the model.")
    attach_timeout_s: PositiveSeconds = Field(
        30.0, description="A worker that finds no coordinator for this long ends."
    )
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels shown by baton workers --json, beside those that the worker adds.",
    )
    revision: str = Field(
        FIRST_REVISION,
        description="Name of the model and engine arguments of this worker; a request stays on "
        "workers of one revision. The coordinator's revision is the stable one, which gets all "
        "requests that no rollout takes.",
    )

    @field_validator("revision")
    @classmethod
    def _is_revision(cls, value: str) -> str:
        if not is_revision(value):
            raise ValueError(f"must be {REVISION_NAMES}")
        return value


class SimulatedAnswer(Section):
    """A written answer of the simulated engine."""

    after: str = Field(
        min_length=1,
        description="Text in the prompt. If several of these texts are in a prompt, the last one "
        "there decides.",
    )
    answer: str = Field(
        min_length=1,
        description="The answer, for example a tool call in the format of tool_call_parser.",
    )


class SimulatedConfig(Section):
    """Timing of the simulated engine: the latency model in ms, multiplied by `time_scale`."""

    time_scale: float = Field(
        1.0, ge=0, description="Factor on all step times; 0: steps take no time."
    )
    prefill_base_ms: float = Field(5.0, ge=0, description="Cost per step that has prompt tokens.")
    prefill_per_token_ms: float = Field(
        0.05, ge=0, description="Cost per prompt token that is not cached."
    )
    prefill_per_token_squared_ms: float = Field(
        0.0, ge=0, description="Cost per squared number of a prompt's tokens that are not cached."
    )
    step_base_ms: float = Field(8.0, ge=0, description="Cost per decode step.")
    step_per_request_ms: float = Field(0.2, ge=0, description="Cost per request in a decode step.")
    step_per_kv_token_ms: float = Field(
        0.0, ge=0, description="Cost per KV token of the decoding requests."
    )
    mixed_base_ms: float | None = Field(
        None,
        ge=0,
        description="Cost per step that has prompt tokens and decodes; null: the larger of "
        "prefill_base_ms and step_base_ms.",
    )
    max_model_len: Count = Field(8192, description="Context length in tokens.")
    kv_tokens: Count = Field(65536, description="Capacity of the KV cache in tokens.")
    block_size_tokens: Count = Field(16, description="Tokens per KV block.")
    prefix_caching: bool = Field(
        True, description="Whether finished blocks are kept for prompts with the same prefix."
    )
    num_layers: Count = Field(4, description="Layers whose KV blocks a handoff moves.")
    block_bytes: Annotated[int, Field(ge=64, le=MAX_COUNT)] = Field(
        1024, description="Bytes of one KV block in one layer."
    )
    host_bytes_per_s: PositiveInt = Field(
        10_000_000_000,
        description="Bytes per second that a load of KV blocks from host memory moves.",
    )
    network_bytes_per_s: PositiveInt = Field(
        10_000_000_000,
        description="Bytes per second of prefixes that a worker sends to others in baton simulate.",
    )
    max_num_seqs: Count = Field(64, description="Requests in one step.")
    max_num_batched_tokens: Count = Field(2048, description="Tokens in one step.")
    mean_output_tokens: int = Field(
        200,
        ge=0,
        description="Mean length of an answer in tokens. Each prompt has a fixed answer length "
        "between half and one and a half times the mean; the answer ends there with finish reason "
        "stop. 0: answers end at max_tokens, as they do for requests with ignore_eos.",
    )
    image_tokens: int = Field(
        0,
        ge=0,
        description="Prompt tokens of one image in a chat; 0: the model takes no images.",
    )
    answers: list[SimulatedAnswer] = Field(
        default_factory=list,
        description="Written answers, to try programs that need certain ones, such as agents with "
        "tools. Other prompts get answers without meaning.",
    )

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV cache per token, over all layers."""
        return self.num_layers * self.block_bytes / self.block_size_tokens

    def host_kv_tokens(self, host_bytes: int | None) -> int:
        """Tokens that a simulated worker's KV store holds in host memory.

        Args:
            host_bytes: `kv_store.host_bytes`; None: as many tokens as the KV cache.
        """
        if not self.prefix_caching:
            return 0
        if host_bytes is None:
            return self.kv_tokens
        return host_bytes // (self.num_layers * self.block_bytes) * self.block_size_tokens
