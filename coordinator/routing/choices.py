"""What the router chose, and why."""

from __future__ import annotations

from typing import NamedTuple

from baton.coordinator.state.requests import WorkerKey


class PrefillChoice(NamedTuple):
    """Where a prompt is computed.

    Attributes:
        worker: the prefill worker.
        predicted_s: seconds until its first token: what is queued there, and its own work.
        work_s: seconds of its own work, which `assign_prefill` counts.
        num_work_tokens: tokens of the prompt that are computed there.
        num_cached_tokens: tokens of the prompt that are expected in the worker's cache.
    """

    worker: WorkerKey
    predicted_s: float
    work_s: float
    num_work_tokens: int
    num_cached_tokens: int


class DecodeChoice(NamedTuple):
    """Where a request is decoded.

    Attributes:
        worker: the decode worker.
        predicted_s: seconds of a decode step there, with this request.
        num_kv_tokens: KV room that the request needs, which `assign_decode` counts.
        num_cached_tokens: tokens of the prompt that the worker holds: they need not be sent.
        num_tokens: tokens of the prompt and of known output.
    """

    worker: WorkerKey
    predicted_s: float
    num_kv_tokens: int
    num_cached_tokens: int
    num_tokens: int

    @property
    def num_new_tokens(self) -> int:
        """How many tokens the decode worker computes where nothing is handed over; at least 1."""
        return max(1, self.num_tokens - self.num_cached_tokens)


class Placement(NamedTuple):
    """Where a request runs.

    Attributes:
        prefill: where the prompt is computed; None: the decode worker computes it.
        decode: where the output is; None: nothing is left to decode after the first token.
        skip_tokens: how many tokens the decode worker has, so that the handoff leaves them out;
            whole blocks.
    """

    prefill: PrefillChoice | None
    decode: DecodeChoice | None
    skip_tokens: int = 0

    @property
    def handoff(self) -> bool:
        """Whether the prefill worker hands the prompt's KV cache over to the decode worker."""
        return self.prefill is not None and self.decode is not None


class RoomWanted(NamedTuple):
    """What batch outputs on a decode worker should make room for.

    Attributes:
        worker: the decode worker.
        num_tokens: KV tokens that are to be free there beside those that are.
        num_requests: how many outputs have to leave at least.
    """

    worker: WorkerKey
    num_tokens: int
    num_requests: int
