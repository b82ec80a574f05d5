"""Counts the free KV blocks of vLLM's cache, and the blocks that requests need.

A look-up of a waiting prompt in the prefix cache takes some 50 us for 1,500 tokens. So each prompt
is looked up once a second at most, and each step looks up few prompts.
engine/vllm_scheduler_class.py checks that vLLM has the names used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

# Seconds after which the cached part of a waiting prompt is looked up again, and largest number of
# look-ups in one step.
LOOKUP_AGAIN_S, _MAX_LOOKUPS = 1.0, 8
# More blocks than any cache has.
_NO_LIMIT = 2**62


class _Lookup(NamedTuple):
    """Which part of a waiting prompt need not be computed.

    Attributes:
        num_tokens: Tokens in the prefix cache and, after those, in host memory.
        blocks: Blocks of the prefix cache, by block table.
        at: Time of the look-up, by time.time.
    """

    num_tokens: int
    blocks: Sequence[Sequence[KVCacheBlock]]
    at: float


_NOT_LOOKED_UP = _Lookup(0, (), 0.0)


class BlockRoom:
    """The room in vLLM's KV cache for the requests of its scheduler.

    Args:
        manager: The cache.
        connector: Baton's connector, which has blocks in host memory.
        requests: The scheduler's requests, by ID.
    """

    def __init__(
        self, manager: KVCacheManager, connector: Any, requests: Mapping[str, Request]
    ) -> None:
        self._manager, self._connector, self._requests = manager, connector, requests
        self._lookups: dict[str, _Lookup] = {}
        self._num_lookups = 0

    def begin_step(self) -> None:
        """Allows the look-ups of one more step."""
        self._num_lookups = 0

    @property
    def num_free(self) -> int:
        """Number of free blocks. Cached blocks that no request holds are among them."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def num_cached(self, request: Request, now: float) -> int:
        """Tokens of a waiting prompt that need not be computed, as of the latest look-up.

        Args:
            request: The prompt; it is looked up again if that is due.
            now: The time, by time.time.
        """
        latest = self._lookups.get(request.request_id, _NOT_LOOKED_UP)
        if now - latest.at <= LOOKUP_AGAIN_S or self._num_lookups >= _MAX_LOOKUPS:
            return latest.num_tokens
        self._num_lookups += 1
        if len(self._lookups) > 2 * len(self._requests):
            self._lookups = {
                name: one for name, one in self._lookups.items() if name in self._requests
            }
        found, num_tokens, *_ = self._manager.get_computed_blocks(request)
        num_tokens += self._connector.num_stored_tokens(request, num_tokens)
        self._lookups[request.request_id] = _Lookup(int(num_tokens), found.blocks, now)
        return int(num_tokens)

    def num_taken(self, request: Request) -> int:
        """Number of free blocks that a request takes for the rest of its tokens.

        Cached blocks count as of the latest look-up. What comes from host memory needs blocks too.
        """
        if request.num_computed_tokens:
            return self.num_blocks(request.num_tokens - request.num_computed_tokens)
        cached = self._lookups.get(request.request_id, _NOT_LOOKED_UP).blocks
        num_held: int = sum(
            one.ref_cnt > 0 and not one.is_null for table in cached for one in table
        )
        return max(0, self.num_blocks(request.num_tokens) - num_held)

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks, of all block tables, that a request holds for this many more tokens."""
        return sum(
            min(
                -(-num_tokens // table.block_size),
                table.max_admission_blocks_per_request or _NO_LIMIT,
            )
            for table in self._manager.coordinator.single_type_managers
        )
