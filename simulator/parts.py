"""What a simulated engine is made of: its shape, its requests, runs of steps, its prefix cache."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from baton.runtime.latency import LatencyModel
from baton.v1 import cluster_pb2


@dataclass(frozen=True, slots=True)
class Shape:
    """What a simulated worker is.

    Attributes:
        model: what its steps cost.
        announced_kv_tokens: what it says of its room; None: the truth. 0 is no limit, for systems
            whose dispatcher does not look at it.
        chunked: whether a prompt may be computed in several steps; else whole prompts share one.
        join_reserve_share: of its room, that must be free beside what a request that joins needs.
        swaps: a request that made room comes back with its KV cache; else it is computed again.
        handoff_s, handoff_per_token_s: until a prompt's KV cache is where it decodes.
        handoff_stalls: the decode worker makes no step meanwhile.
        delay_s: of every message between it and the coordinator.
        flush_s: how long tokens in the middle of an output are kept back at most.
    """

    model: LatencyModel
    kv_tokens: int = 65536
    announced_kv_tokens: int | None = None
    block_size_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131072
    chunked: bool = True
    join_reserve_share: float = 0.0
    swaps: bool = False
    handoff_s: float = 0.002
    handoff_per_token_s: float = 0.0
    handoff_stalls: bool = False
    delay_s: float = 0.001
    prefix_caching: bool = False
    flush_s: float = 2.0


@dataclass(slots=True, eq=False)
class Live:
    """A request in the engine.

    Attributes:
        num_missing: tokens to compute before the next output.
        num_done: computed.
        num_tokens: in its KV cache once it runs; of one that decodes, when it joined.
        num_left: output tokens still to be made; of one that decodes, when it joined.
        offset: of the next output token to be told.
        last_at: when its last token came to be; nan before the first here.
    """

    request_id: str
    attempt: int
    priority: int
    order: int
    max_tokens: int
    num_missing: int
    num_done: int
    num_tokens: int
    num_left: int
    offset: int
    hashes: Sequence[int]
    num_cached: int = 0
    handed: bool = False
    joined_at_step: int = -1
    told: int = 0
    first_told: bool = False
    gone: bool = False
    last_at: float = math.nan

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt


@dataclass(slots=True)
class Run:
    """Steps that decode the same requests.

    Attributes:
        first_s: of the first step.
        more_s: by which each step is longer than the one before.
    """

    began_at: float
    num_steps: int
    first_s: float
    more_s: float

    def lasts_s(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.more_s * num_steps * (num_steps - 1) / 2

    def done_at(self, when: float) -> int:
        """Steps that are over by then."""
        passed = when - self.began_at
        if passed <= 0:
            return 0
        if self.more_s <= 0:
            number = passed / self.first_s
        else:
            half = self.first_s - self.more_s / 2
            number = (math.sqrt(half * half + 2 * self.more_s * passed) - half) / self.more_s
        return min(self.num_steps, int(number + 1e-9))


class PrefixCache:
    """Blocks of requests that have left, until others need the room."""

    def __init__(self, num_tokens: int, block_size_tokens: int) -> None:
        self._num_blocks = num_tokens // block_size_tokens
        self._block_size_tokens = block_size_tokens
        # Hashes of blocks, the longest unused first.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, hashes: Sequence[int]) -> int:
        """Of a prompt's tokens; its blocks have just been used."""
        found = 0
        for one in hashes:
            if one not in self._blocks:
                break
            self._blocks.move_to_end(one)
            found += 1
        return found * self._block_size_tokens

    def keep(self, hashes: Sequence[int], num_tokens: int) -> cluster_pb2.CacheEvents | None:
        """Takes in the blocks of so many tokens; what has changed, None when nothing has."""
        stored, removed, blocks = array("Q"), array("Q"), self._blocks
        for one in hashes[: num_tokens // self._block_size_tokens]:
            if one not in blocks:
                stored.append(one)
            blocks[one] = None
            blocks.move_to_end(one)
        while len(blocks) > self._num_blocks:
            removed.append(blocks.popitem(last=False)[0])
        if not stored and not removed:
            return None
        return cluster_pb2.CacheEvents(stored=stored, removed=removed)
