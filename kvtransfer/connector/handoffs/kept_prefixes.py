"""Keeps cached blocks on the device for a request that waits for the blocks after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.runtime.kv.fetches import MAX_KEPT_SHARE
from baton.runtime.kv.kv_groups import KvGroup


@dataclass(frozen=True, slots=True)
class _Kept:
    """Blocks kept for one request, in the order of the prompt, and until when at most."""

    blocks: list[Any]
    until: float


class KeptPrefixes:
    """Holds cached blocks for requests that have no blocks of their own yet.

    Without it, other requests could evict a block that is left out of a handoff under way, so that
    the whole prompt would be computed. Blocks are held for a limited time, because a request that
    is ahead in the queue may need their room.

    Args:
        pool: The engine's vllm.v1.core.block_pool.BlockPool.
        tables: The block tables of its cache.
    """

    def __init__(self, pool: Any, tables: Sequence[KvGroup]) -> None:
        self._pool, self._tables = pool, tables
        self._kept: dict[str, _Kept] = {}
        self._num_blocks = 0

    def keep(self, request: Any, num_tokens: int, until: float) -> None:
        """Holds the first blocks of a prompt, if the cache has all of them and they are not many.

        Args:
            request: The engine's vllm.v1.request.Request that it has just been given.
            num_tokens: Tokens of these blocks; whole blocks.
            until: When the blocks are let go at the latest, by time.monotonic.
        """
        found: list[Any] = []
        for table in self._tables:
            per_block = table.block_size_tokens // self._pool.hash_block_size
            num_hashes = num_tokens // self._pool.hash_block_size
            # vLLM names a block by the hash at its end.
            for name in request.block_hashes[:num_hashes][per_block - 1 :: per_block]:
                if (blocks := self._pool.get_cached_block(name, [table.table])) is None:
                    return
                found += blocks
        most = int(MAX_KEPT_SHARE * self._pool.num_gpu_blocks)
        if not found or self._num_blocks + len(found) > most:
            return
        self._pool.touch(found)
        self._kept[request.request_id] = _Kept(found, until)
        self._num_blocks += len(found)

    def let_go(self, request_id: str) -> None:
        """Frees the blocks that are held for a request; idempotent."""
        if (kept := self._kept.pop(request_id, None)) is not None:
            self._num_blocks -= len(kept.blocks)
            # The last block of a prompt is evicted first.
            self._pool.free_blocks(reversed(kept.blocks))

    def expire(self, now: float) -> None:
        """Frees blocks that were held for too long."""
        for request_id in [one for one, kept in self._kept.items() if kept.until <= now]:
            self.let_go(request_id)

    def __bool__(self) -> bool:
        """Whether blocks are held."""
        return bool(self._kept)
