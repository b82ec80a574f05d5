"""What the coordinator has assigned to one worker: its own count, ahead of any report."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from baton.coordinator.state.requests import WorkerKey


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
        chunk_tokens: of prompts, computed in one step at most.
        max_seqs: requests that its engine has in its steps at a time; others wait inside it.
    """

    latency: Latency
    host_id: str
    kv_tokens: int
    block_size_tokens: int
    kv_bytes_per_token: int = 0
    chunk_tokens: int = 2048
    max_seqs: int = 2**31

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size_tokens", "chunk_tokens", "max_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")


@dataclass(slots=True)
class _Decode:
    """A request that is, or will be, decoded on a worker.

    Attributes:
        num_kv_tokens: KV room that is reserved for it.
        urgent: whether batch requests yield to it.
        yields: whether it can be told to make room for an urgent one.
        arrived: whether its prompt is computed.
    """

    num_kv_tokens: int
    urgent: bool
    yields: bool
    arrived: bool = False


class _Prefill(NamedTuple):
    """A prompt that a worker computes, or will: predicted seconds, and tokens to be computed."""

    work_s: float
    num_tokens: int


class Ahead(NamedTuple):
    """How much prefill work a worker may have and still take another prompt.

    Attributes:
        num_chunks: it is full with this many steps of work or more.
        foresees: whether what is predicted to be computed already of its first prompt does not
            count, so that the next prompt is there in time.
    """

    num_chunks: float
    foresees: bool


ANYTHING_AHEAD = Ahead(math.inf, foresees=False)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """One worker's entry in the router.

    Attributes:
        bit: the worker's bit in masks of workers.
        free_at: when the prefill work assigned here is predicted to be done.
        queued_tokens: tokens of prompts assigned here whose first token has not come.
        num_urgent: decodes that batch requests yield to.
        held_up_until: prompts that were computed here beside outputs have made as many of their
            steps too long as is agreed until then: none may before.
        reserved_tokens: KV tokens of all decodes assigned here, with their expected output; also
            of those whose prompts are still computed elsewhere.
        yielding_tokens: of these, of the decodes that can be told to make room.
        free_tokens: KV room that nothing assigned here is expected to need.
    """

    key: WorkerKey
    traits: WorkerTraits
    bit: int
    free_at: float = -math.inf
    queued_tokens: int = 0
    num_urgent: int = 0
    held_up_until: float = -math.inf
    reserved_tokens: int = 0
    yielding_tokens: int = 0
    free_tokens: int = field(init=False)
    # In the order they came. (The first entry of a dict that loses its first ones is slow to find.)
    _prefills: OrderedDict[str, _Prefill] = field(default_factory=OrderedDict)
    _decodes: dict[str, _Decode] = field(default_factory=dict)
    # Sum of the work in _prefills, and since when the first of them has been that.
    _queued_s: float = 0.0
    _first_since: float = -math.inf
    _unassigned_tokens: int = 0

    def __post_init__(self) -> None:
        self.free_tokens = self.traits.kv_tokens

    @property
    def num_prefills(self) -> int:
        return len(self._prefills)

    @property
    def num_decodes(self) -> int:
        return len(self._decodes)

    @property
    def num_arrived(self) -> int:
        """How many decodes have their prompts computed."""
        return sum(one.arrived for one in self._decodes.values())

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step that computes a whole chunk of a prompt."""
        return self.traits.latency.prefill_s(self.traits.chunk_tokens)

    @property
    def may_yield(self) -> bool:
        """Whether one more batch decode may join however long steps get: none or all are urgent."""
        return not self.num_urgent or self.num_urgent == len(self._decodes)

    def itl_with_s(self, num_requests: int, num_tokens: int) -> float:
        """Predicted seconds per decode step with so many more requests and KV tokens."""
        return self.traits.latency.decode_step_s(
            len(self._decodes) + num_requests, self.reserved_tokens + num_tokens
        )

    def queued_s(self, now: float) -> float:
        """Predicted seconds of prefill work that are left here."""
        return max(0.0, self.free_at - now)

    def is_full(self, ahead: Ahead, now: float) -> bool:
        """Whether the worker takes no other prompt behind what it has."""
        most = ahead.num_chunks * self.traits.chunk_tokens
        return self.queued_tokens >= most and not (
            ahead.foresees and self._has_room_at(most) <= now
        )

    def room_at(self, ahead: Ahead, now: float) -> float:
        """When a full worker is predicted to have room, by the core's clock.

        Infinite where it will not before it reports a first token.
        """
        most = ahead.num_chunks * self.traits.chunk_tokens
        if not ahead.foresees or self.queued_tokens < most:
            return math.inf
        at = self._has_room_at(most)
        return at if at > now else math.inf

    def _has_room_at(self, num_tokens: float) -> float:
        """When fewer tokens than that are left, by what is predicted of the first prompt."""
        first = next(iter(self._prefills.values()), None)
        if first is None:
            return -math.inf
        num_more = num_tokens - (self.queued_tokens - first.num_tokens)
        if num_more <= 0:
            # Never more than that behind the first one, however late that is.
            return math.inf
        share = max(0.0, 1 - num_more / first.num_tokens)
        return self._first_since + first.work_s * share

    def assign_prefill(
        self, request_id: str, work_s: float, num_tokens: int, now: float = 0.0
    ) -> None:
        assert request_id not in self._prefills
        if not self._prefills:
            self._first_since = now
        self._prefills[request_id] = _Prefill(work_s, num_tokens)
        self._queued_s += work_s
        self.free_at = max(self.free_at, now) + work_s
        self.queued_tokens += num_tokens

    def end_prefill(self, request_id: str, now: float = 0.0) -> None:
        """A prompt's first token came, or never will; idempotent."""
        was_first = next(iter(self._prefills), None) == request_id
        ended = self._prefills.pop(request_id, None)
        if ended is not None:
            if was_first:
                self._first_since = now
            self.queued_tokens -= ended.num_tokens
            # Differences of floats would never come back to 0.
            self._queued_s = self._queued_s - ended.work_s if self._prefills else 0.0
            # The rest is predicted from now on: errors of this one's prediction are over.
            self.free_at = now + self._queued_s

    def hold_up(self, num_tokens: int, share: float, now: float) -> None:
        """A prompt is computed beside outputs and makes some of their steps too long.

        Args:
            num_tokens: tokens of the prompt that are computed.
            share: the share of an output's steps that may be too long.
            now: by the core's clock.
        """
        num_steps = -(-num_tokens // self.traits.chunk_tokens)
        until = now + num_steps * self.itl_with_s(0, 0) / share
        self.held_up_until = max(self.held_up_until, until)

    def assign_decode(
        self, request_id: str, num_kv_tokens: int, *, urgent: bool = False, yields: bool = False
    ) -> None:
        assert request_id not in self._decodes
        self._decodes[request_id] = _Decode(num_kv_tokens, urgent, yields)
        self.num_urgent += urgent
        self.yielding_tokens += num_kv_tokens if yields else 0
        self.reserved_tokens += num_kv_tokens
        self.free_tokens -= num_kv_tokens

    def arrive(self, request_id: str) -> None:
        """The prompt of a decode is computed."""
        decode = self._decodes.get(request_id)
        if decode is not None:
            decode.arrived = True

    def in_blocks(self, num_tokens: int) -> int:
        """As many tokens as the blocks have that so many take."""
        block_size = self.traits.block_size_tokens
        return -(-num_tokens // block_size) * block_size

    def yielding_tokens_of(self, request_id: str) -> int:
        """KV tokens that a decode would make room with; 0 where it cannot be told to."""
        decode = self._decodes.get(request_id)
        return decode.num_kv_tokens if decode is not None and decode.yields else 0

    def outgrows(self, request_id: str, num_kv_tokens: int) -> bool:
        """Whether a decode needs more KV tokens than are reserved for it."""
        decode = self._decodes.get(request_id)
        return decode is not None and num_kv_tokens > decode.num_kv_tokens

    def grow(self, request_id: str, num_kv_tokens: int) -> None:
        """Reserves at least so many KV tokens for a decode."""
        decode = self._decodes[request_id]
        num_more = max(0, num_kv_tokens - decode.num_kv_tokens)
        decode.num_kv_tokens += num_more
        self.yielding_tokens += num_more if decode.yields else 0
        self.reserved_tokens += num_more
        self.free_tokens -= num_more

    def end_decode(self, request_id: str) -> bool:
        """A decode is over, or goes elsewhere; idempotent. Returns whether it was urgent."""
        decode = self._decodes.pop(request_id, None)
        if decode is None:
            return False
        self.num_urgent -= decode.urgent
        self.yielding_tokens -= decode.num_kv_tokens if decode.yields else 0
        self.reserved_tokens -= decode.num_kv_tokens
        self.free_tokens += decode.num_kv_tokens
        return decode.urgent

    def report(self, kv_tokens_used: int) -> None:
        """Takes in how many KV tokens the worker says that it holds.

        What is assigned here is counted before the worker holds it. What goes beyond that was
        assigned by another coordinator, and no client has come back for it yet.
        """
        unassigned = max(0, kv_tokens_used - self.reserved_tokens)
        self.free_tokens += self._unassigned_tokens - unassigned
        self._unassigned_tokens = unassigned

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum differs from its parts."""
        prefills, decodes = self._prefills.values(), self._decodes.values()
        assert self.queued_tokens == sum(one.num_tokens for one in prefills)
        queued_s = math.fsum(one.work_s for one in prefills)
        assert math.isclose(self._queued_s, queued_s, rel_tol=1e-6, abs_tol=1e-6)
        assert self.num_urgent == sum(one.urgent for one in decodes)
        assert self.reserved_tokens == sum(one.num_kv_tokens for one in decodes)
        yielding = sum(one.num_kv_tokens for one in decodes if one.yields)
        assert self.yielding_tokens == yielding
        taken = self.reserved_tokens + self._unassigned_tokens
        assert self.free_tokens == self.traits.kv_tokens - taken
