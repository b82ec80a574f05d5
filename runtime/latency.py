"""The latency model: what a prefill and a decode step cost on one kind of worker.

Prefill time is a + b*tokens + c*tokens^2 over the prompt tokens left after cache hits; a decode
step is a + b*batch + c*KV tokens. A prompt computed in several chunks pays b and c once in sum and
a once per step it takes part in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from baton.runtime.config import LatencyConfig, SimulatedConfig


class PrefillChunk(NamedTuple):
    """A part of one prompt, computed in one step.

    Attributes:
        num_done_tokens: of this prompt, computed (not cached) by earlier steps.
        num_tokens: in this chunk.
    """

    num_done_tokens: int
    num_tokens: int

    @property
    def token_squares(self) -> int:
        """end^2 - done^2: over all chunks of a prompt, the square of its length."""
        return self.num_tokens * (2 * self.num_done_tokens + self.num_tokens)


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Coefficients in seconds; all at least 0."""

    prefill_base_s: float
    prefill_per_token_s: float
    prefill_per_token_squared_s: float
    step_base_s: float
    step_per_request_s: float
    step_per_kv_token_s: float

    @classmethod
    def from_config(cls, config: SimulatedConfig | LatencyConfig) -> LatencyModel:
        """The simulated engine's model (`time_scale` is left to whoever sleeps), or the seed."""
        return cls(
            prefill_base_s=config.prefill_base_ms / 1e3,
            prefill_per_token_s=config.prefill_per_token_ms / 1e3,
            prefill_per_token_squared_s=config.prefill_per_token_squared_ms / 1e3,
            step_base_s=config.step_base_ms / 1e3,
            step_per_request_s=config.step_per_request_ms / 1e3,
            step_per_kv_token_s=config.step_per_kv_token_ms / 1e3,
        )

    def prefill_s(self, num_tokens: int) -> float:
        """A whole prompt alone in one step; `num_tokens` are those no cache holds."""
        return (
            self.prefill_base_s
            + self.prefill_per_token_s * num_tokens
            + self.prefill_per_token_squared_s * num_tokens**2
        )

    def decode_step_s(self, num_requests: int, num_kv_tokens: int) -> float:
        """One token for each of `num_requests` that attend to `num_kv_tokens` in sum."""
        if not num_requests:
            return 0.0
        return (
            self.step_base_s
            + self.step_per_request_s * num_requests
            + self.step_per_kv_token_s * num_kv_tokens
        )

    def step_s(self, chunks: Iterable[PrefillChunk], num_decodes: int, num_kv_tokens: int) -> float:
        """A step that computes prompt chunks and decodes in one go.

        Args:
            chunks: of prompts; each belongs to another request.
            num_decodes: requests that get one more token.
            num_kv_tokens: what these attend to, in sum.
        """
        num_tokens = token_squares = 0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            token_squares += chunk.token_squares
        return self.mixed_step_s(num_tokens, token_squares, num_decodes, num_kv_tokens)

    def mixed_step_s(
        self, num_prefill_tokens: int, token_squares: int, num_decodes: int, num_kv_tokens: int
    ) -> float:
        """As `step_s`, of chunks with so many tokens, and squares of PrefillChunk's, in sum."""
        seconds = self.decode_step_s(num_decodes, num_kv_tokens)
        if num_prefill_tokens:
            seconds += (
                self.prefill_base_s
                + self.prefill_per_token_s * num_prefill_tokens
                + self.prefill_per_token_squared_s * token_squares
            )
        return seconds
