"""The latency model: time of a prefill and of a decode step on one kind of worker.

Prefill time is a + b*tokens + c*tokens^2 over the prompt tokens that are not cached. A decode step
takes a + b*batch + c*KV tokens. A prompt computed in several chunks pays the b and c terms once in
total, and the a term once per step. A step that computes prompt chunks and decodes is one forward
pass, so it pays one base, not two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

from baton.runtime.config import LatencyConfig, SimulatedConfig


class PrefillChunk(NamedTuple):
    """A part of one prompt, computed in one step.

    Attributes:
        num_done_tokens: Tokens of this prompt that earlier steps computed (not cached tokens).
        num_tokens: Tokens in this chunk.
    """

    num_done_tokens: int
    num_tokens: int

    @property
    def token_squares(self) -> int:
        """end^2 - done^2: summed over all chunks of a prompt, the square of its length."""
        return self.num_tokens * (2 * self.num_done_tokens + self.num_tokens)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Coefficients of the model, in seconds; all at least 0.

    Attributes:
        prefill_base_s: Base of a step that only computes prompt chunks.
        step_base_s: Base of a step that only decodes.
        mixed_base_s: Base of a step that does both; by default the larger of the two other bases.
    """

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token_squared_s: float
    step_base_s: float
    step_per_request_s: float
    step_per_kv_token_s: float
    mixed_base_s: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.mixed_base_s):
            object.__setattr__(self, "mixed_base_s", max(self.prefill_base_s, self.step_base_s))

    @classmethod
    def from_config(cls, config: SimulatedConfig | LatencyConfig) -> LatencyModel:
        """Model of the simulated engine (the caller applies `time_scale`), or the prior."""
        mixed_ms = config.mixed_base_ms
        return cls(
            prefill_base_s=config.prefill_base_ms / 1e3,
            prefill_per_token_s=config.prefill_per_token_ms / 1e3,
            prefill_per_token_squared_s=config.prefill_per_token_squared_ms / 1e3,
            step_base_s=config.step_base_ms / 1e3,
            step_per_request_s=config.step_per_request_ms / 1e3,
            step_per_kv_token_s=config.step_per_kv_token_ms / 1e3,
            mixed_base_s=math.nan if mixed_ms is None else mixed_ms / 1e3,
        )

    def scaled(self, factor: float) -> LatencyModel:
        """The model of a worker whose steps take `factor` times as long."""
        return LatencyModel(*(value * factor for value in astuple(self)))

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds for a whole prompt alone in one step; `num_tokens` excludes cached tokens."""
        return self.prefill_base_s + self.chunk_s(0, num_tokens)

    def chunk_s(self, num_done: int, num_tokens: int) -> float:
        """Seconds that a prompt chunk adds to a step that computes something else as well.

        Args:
            num_done: Tokens of the prompt that earlier steps computed.
            num_tokens: Tokens of the chunk.
        """
        squares = num_tokens * (2 * num_done + num_tokens)
        return self.prefill_per_token_s * num_tokens + self.prefill_per_token_squared_s * squares

    def decode_step_s(self, num_requests: float, num_kv_tokens: float) -> float:
        """Seconds for one token of each of `num_requests` with `num_kv_tokens` in total.

        Expected numbers may be fractions.
        """
        if not num_requests:
            return 0.0
        return (
            self.step_base_s
            + self.step_per_request_s * num_requests
            + self.step_per_kv_token_s * num_kv_tokens
        )

    def step_s(self, chunks: Iterable[PrefillChunk], num_decodes: int, num_kv_tokens: int) -> float:
        """Seconds for a step that computes prompt chunks and decodes.

        Args:
            chunks: Prompt chunks, each of a different request.
            num_decodes: Requests that get one more token.
            num_kv_tokens: KV tokens that these requests attend to, in total.
        """
        num_tokens = token_squares = 0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            token_squares += chunk.token_squares
        return self.mixed_step_s(num_tokens, token_squares, num_decodes, num_kv_tokens)

    def mixed_step_s(
        self, num_prefill_tokens: int, token_squares: int, num_decodes: int, num_kv_tokens: int
    ) -> float:
        """Like `step_s`, with the chunks' tokens and `token_squares` already summed."""
        if not num_prefill_tokens:
            return self.decode_step_s(num_decodes, num_kv_tokens)
        seconds = (
            self.prefill_per_token_s * num_prefill_tokens
            + self.prefill_per_token_squared_s * token_squares
        )
        if not num_decodes:
            return self.prefill_base_s + seconds
        return (
            self.mixed_base_s
            + self.step_per_request_s * num_decodes
            + self.step_per_kv_token_s * num_kv_tokens
            + seconds
        )
