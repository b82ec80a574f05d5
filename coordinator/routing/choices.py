"""What the router chose, and why."""

from __future__ import annotations

from typing import NamedTuple

from baton.coordinator.core.request import WorkerKey


class PrefillChoice(NamedTuple):
    """Where a prompt is computed.

    Attributes:
        predicted_s: until its first token: what is queued there, and its own work.
        work_s: its own work: what `assign_prefill` counts.
        num_cached_tokens: of the prompt, expected in the worker's cache.
        num_work_tokens: of the prompt, to be computed.
    """

    worker: WorkerKey
    predicted_s: float
    work_s: float
    num_work_tokens: int
    num_cached_tokens: int


class DecodeChoice(NamedTuple):
    """Where a request is decoded.

    Attributes:
        predicted_s: one decode step there, with this request.
        num_kv_tokens: room it needs: what `assign_decode` counts.
        num_cached_tokens: of the prompt, held there already: they need not be sent.
        num_tokens: of the prompt, and of known output.
    """

    worker: WorkerKey
    predicted_s: float
    num_kv_tokens: int
    num_cached_tokens: int
    num_tokens: int

    @property
    def num_new_tokens(self) -> int:
        """That are to be computed where nothing is handed over; never none."""
        return max(1, self.num_tokens - self.num_cached_tokens)


class Placement(NamedTuple):
    """Where a request runs.

    Attributes:
        prefill: None: the decode worker computes the prompt.
        decode: None: nothing is left to decode after the first token.
        skip_tokens: that the decode worker has, and the handoff leaves out; whole blocks.
    """

    prefill: PrefillChoice | None
    decode: DecodeChoice | None
    skip_tokens: int = 0

    @property
    def handoff(self) -> bool:
        """Whether the prefill worker hands its KV cache over to the decode worker."""
        return self.prefill is not None and self.decode is not None
