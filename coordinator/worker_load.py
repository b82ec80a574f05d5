"""What the coordinator has assigned to one worker: its own count, ahead of any report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from baton.coordinator.request import WorkerKey


class Latency(Protocol):
    """What work costs on a kind of worker, in seconds (runtime/latency.py)."""

    def prefill_s(self, num_tokens: int) -> float: ...
    def decode_step_s(self, num_requests: int, num_kv_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerTraits:
    """What a worker is, as far as routing goes.

    Attributes:
        latency: of its kind; may be refitted while it is used here.
        host_id: workers with equal ones share memory.
        kv_tokens: room of its KV cache.
        block_size_tokens: of its KV cache.
        kv_bytes_per_token: what a handoff moves, all layers and ranks.
    """

    latency: Latency
    host_id: str
    kv_tokens: int
    block_size_tokens: int
    kv_bytes_per_token: int = 0

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")


@dataclass(slots=True)
class _Decode:
    """Attributes: num_kv_tokens: reserved; arrived: its prompt is in this worker's KV cache."""

    num_kv_tokens: int
    arrived: bool


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """One worker's entry in the router.

    Attributes:
        bit: the worker's mask.
        queued_s: seconds of prefill work assigned here whose first token has not come.
        reserved_tokens: KV tokens of all decodes assigned here, expected output and prompts that
            are still being computed elsewhere included.
        free_tokens: KV room that nothing here is expected to need.
    """

    key: WorkerKey
    traits: WorkerTraits
    bit: int
    queued_s: float = 0.0
    reserved_tokens: int = 0
    free_tokens: int = field(init=False)
    _prefills: dict[str, float] = field(default_factory=dict)
    _decodes: dict[str, _Decode] = field(default_factory=dict)
    _arrived_tokens: int = 0
    _outgrown_tokens: int = 0

    def __post_init__(self) -> None:
        self.free_tokens = self.traits.kv_tokens

    @property
    def num_prefills(self) -> int:
        return len(self._prefills)

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    def itl_with_s(self, num_requests: int, num_tokens: int) -> float:
        """Predicted seconds per decode step with so many more requests and KV tokens."""
        return self.traits.latency.decode_step_s(
            len(self._decodes) + num_requests, self.reserved_tokens + num_tokens
        )

    def assign_prefill(self, request_id: str, work_s: float) -> None:
        assert request_id not in self._prefills
        self._prefills[request_id] = work_s
        self.queued_s += work_s

    def end_prefill(self, request_id: str) -> None:
        """Its first token came, or never will; idempotent."""
        self._prefills.pop(request_id, None)
        # Summed again: differences of floats would never come back to 0.
        self.queued_s = math.fsum(self._prefills.values())

    def assign_decode(self, request_id: str, num_kv_tokens: int) -> None:
        assert request_id not in self._decodes
        self._decodes[request_id] = _Decode(num_kv_tokens, arrived=False)
        self.reserved_tokens += num_kv_tokens
        self.free_tokens -= num_kv_tokens

    def arrive(self, request_id: str) -> None:
        """Its prompt is in this worker's KV cache from now on, and in its reports."""
        decode = self._decodes.get(request_id)
        if decode is not None and not decode.arrived:
            decode.arrived = True
            self._arrived_tokens += decode.num_kv_tokens

    def end_decode(self, request_id: str) -> None:
        """Idempotent."""
        decode = self._decodes.pop(request_id, None)
        if decode is not None:
            self.reserved_tokens -= decode.num_kv_tokens
            self.free_tokens += decode.num_kv_tokens
            self._arrived_tokens -= decode.num_kv_tokens if decode.arrived else 0

    def report(self, kv_tokens_used: int) -> None:
        """Takes in what the worker says: outputs that grow beyond what was expected need room."""
        outgrown = max(0, kv_tokens_used - self._arrived_tokens)
        self.free_tokens += self._outgrown_tokens - outgrown
        self._outgrown_tokens = outgrown

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum differs from its parts."""
        assert math.isclose(self.queued_s, sum(self._prefills.values()), abs_tol=1e-9)
        decodes = self._decodes.values()
        assert self.reserved_tokens == sum(one.num_kv_tokens for one in decodes)
        taken = self.reserved_tokens + self._outgrown_tokens
        assert self.free_tokens == self.traits.kv_tokens - taken
        assert self._arrived_tokens == sum(one.num_kv_tokens for one in decodes if one.arrived)
