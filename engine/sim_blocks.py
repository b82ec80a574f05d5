"""The paged KV cache of the simulated engine: holders and cached content of each block.

A full block keeps its hash and content after the last request has freed it, until the room is
needed. The block that was unused for longest is evicted first; among the blocks of one request the
last block goes first, so that the rest is always a prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from baton.kvtransfer.block_changes import BlockChanges, CacheChange


class BlockPool:
    """Allocates KV blocks. A block is free or held; several requests may hold a cached block.

    Args:
        num_blocks: Total number of blocks.
        block_size_tokens: Tokens per block.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks, self._block_size = num_blocks, block_size_tokens
        # Free blocks; the first is allocated next.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._held: dict[str, list[int]] = {}
        self._num_holders = [0] * num_blocks
        self._cached: dict[int, int] = {}
        self._hashes: dict[int, int] = {}
        self._changes = BlockChanges()

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that requests hold."""
        return self.num_blocks - len(self._free)

    @property
    def num_used_tokens(self) -> int:
        return self.num_used_blocks * self._block_size

    def is_cached(self, block_hash: int) -> bool:
        return block_hash in self._cached

    def start(
        self, engine_request_id: str, num_tokens: int, hashes: Sequence[int] = ()
    ) -> int | None:
        """Allocates blocks for `num_tokens` to a request that holds none.

        Args:
            engine_request_id: ID of the request.
            num_tokens: Tokens to make room for, including those from the cache.
            hashes: Hashes of the blocks that the request can take from the cache, from its first
                block on.

        Returns:
            Number of blocks taken from the cache. None if there is no room; nothing has changed
                then.
        """
        assert engine_request_id not in self._held
        cached = list[int]()
        for block_hash in hashes:
            if (block := self._cached.get(block_hash)) is None:
                break
            cached.append(block)
        num_new = -(-num_tokens // self._block_size) - len(cached)
        if num_new > len(self._free) - sum(block in self._free for block in cached):
            return None
        for block in cached:
            self._free.pop(block, None)
            self._num_holders[block] += 1
        self._held[engine_request_id] = [*cached, *(self._take() for _ in range(num_new))]
        return len(cached)

    def keep(self, name: str, hashes: Sequence[int]) -> bool:
        """Holds cached blocks under a name until `free`, if all of them are cached."""
        assert name not in self._held
        cached = [self._cached[one] for one in hashes if one in self._cached]
        if len(cached) < len(hashes):
            return False
        for block in cached:
            self._free.pop(block, None)
            self._num_holders[block] += 1
        self._held[name] = cached
        return True

    def grow(self, engine_request_id: str, num_tokens: int) -> bool:
        """Grows a request's blocks to hold `num_tokens`.

        Returns:
            False if there is no room; nothing has changed then.
        """
        held = self._held.get(engine_request_id, [])
        missing = -(-num_tokens // self._block_size) - len(held)
        if missing > len(self._free):
            return False
        if missing > 0:
            held = self._held.setdefault(engine_request_id, held)
            held.extend(self._take() for _ in range(missing))
        return True

    def cache(self, engine_request_id: str, first_block: int, hashes: Sequence[int]) -> None:
        """Caches full blocks of a request, from its `first_block` on.

        If several blocks have the same hash, the first one stays cached.
        """
        for block, block_hash in zip(
            self._held[engine_request_id][first_block:], hashes, strict=False
        ):
            if block_hash not in self._cached and block not in self._hashes:
                self._cached[block_hash], self._hashes[block] = block, block_hash
                self._changes.store(block_hash)

    def free(self, engine_request_id: str) -> None:
        """Frees all blocks of a request."""
        for block in reversed(self._held.pop(engine_request_id, ())):
            self._num_holders[block] -= 1
            if not self._num_holders[block]:
                self._free[block] = None
                # A block without a hash cannot be found again, so it is reused before cached
                # blocks.
                self._free.move_to_end(block, last=block in self._hashes)

    def delete(self, is_meant: Callable[[int], bool]) -> int:
        """Takes free blocks out of the cache; returns how many.

        Args:
            is_meant: Says by its hash whether a block is meant.
        """
        gone = [
            (block_hash, block)
            for block_hash, block in self._cached.items()
            if block in self._free and is_meant(block_hash)
        ]
        for block_hash, block in gone:
            del self._cached[block_hash], self._hashes[block]
            self._free.move_to_end(block, last=False)
            self._changes.remove(block_hash)
        return len(gone)

    def take_change(self) -> CacheChange | None:
        """Returns the cache's changes since the last call; None for no change."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Raises RuntimeError if a block is leaked, counted wrong, or cached under a wrong hash."""
        holders = Counter(block for held in self._held.values() for block in held)
        if sorted([*self._free, *holders]) != list(range(self.num_blocks)):
            raise RuntimeError("KV blocks were lost or given out while they were held")
        if any(count != holders[block] for block, count in enumerate(self._num_holders)):
            raise RuntimeError("KV blocks have another number of holders than was counted")
        if self._cached != {name: block for block, name in self._hashes.items()}:
            raise RuntimeError("cached KV blocks and their hashes differ")
        shared = [block for block, count in holders.items() if count > 1]
        if any(block not in self._hashes for block in shared):
            raise RuntimeError("KV blocks that are not cached were given out twice")

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if (block_hash := self._hashes.pop(block, None)) is not None:
            del self._cached[block_hash]
            self._changes.remove(block_hash)
        self._num_holders[block] = 1
        return block
