"""The simulated engine's KV store in host memory: which blocks it holds, and their eviction order.

The engine copies every full block here, as vLLM's offloading does, so that an evicted block can be
loaded again. The least recently used block is evicted first; among the blocks of one request the
last block goes first. A block that is being loaded is pinned and stays.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from baton.kvtransfer.block_changes import BlockChanges, CacheChange


class HostTier:
    """Blocks in host memory, by hash.

    Args:
        num_blocks: Size in blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Least recently used first.
        self._blocks: OrderedDict[int, None] = OrderedDict()
        # Blocks that a request loads, and the number of such requests by block.
        self._loads: dict[str, Sequence[int]] = {}
        self._num_pins: Counter[int] = Counter()
        self._changes = BlockChanges()

    def __len__(self) -> int:
        return len(self._blocks)

    def holds(self, block_hash: int) -> bool:
        return block_hash in self._blocks

    def num_held(self, hashes: Sequence[int], begin: int) -> int:
        """Returns how many blocks from index `begin` on are held without a gap."""
        end = begin
        while end < len(hashes) and hashes[end] in self._blocks:
            end += 1
        return end - begin

    def store(self, hashes: Sequence[int], begin: int) -> None:
        """Stores a request's blocks from index `begin` on, and marks all its blocks as just used.

        Blocks that find no room, because all others are in use, are left out.
        """
        self.touch(hashes)
        own: set[int] | None = None
        for block in hashes[begin:]:
            if block in self._blocks:
                continue
            if len(self._blocks) >= self.num_blocks:
                own = own if own is not None else set(hashes)
                if not self._evict(own):
                    break
            self._blocks[block] = None
            self._changes.store(block)
        self.touch(hashes)

    def touch(self, hashes: Sequence[int]) -> None:
        """Marks blocks as just used, as far as they are held."""
        for block in reversed(hashes):
            if block in self._blocks:
                self._blocks.move_to_end(block)

    def begin_load(self, engine_request_id: str, hashes: Sequence[int]) -> None:
        """Pins blocks until `end_load`."""
        assert engine_request_id not in self._loads
        self._loads[engine_request_id] = hashes
        self._num_pins.update(hashes)

    def end_load(self, engine_request_id: str) -> None:
        """Unpins the blocks that a request loads; idempotent."""
        for block in self._loads.pop(engine_request_id, ()):
            self._num_pins[block] -= 1
            if not self._num_pins[block]:
                del self._num_pins[block]

    def delete(self, is_meant: Callable[[int], bool]) -> int:
        """Deletes blocks that are not being loaded; returns how many.

        Args:
            is_meant: Says by its hash whether a block is meant.
        """
        gone = [one for one in self._blocks if one not in self._num_pins and is_meant(one)]
        for block in gone:
            del self._blocks[block]
            self._changes.remove(block)
        return len(gone)

    def take_change(self) -> CacheChange | None:
        """Returns the changes since the last call; None for no change."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Raises RuntimeError if there are too many blocks, or a pinned block is missing."""
        if len(self._blocks) > self.num_blocks:
            raise RuntimeError(f"{len(self._blocks)} KV blocks are in room for {self.num_blocks}")
        if self._num_pins != Counter(block for load in self._loads.values() for block in load):
            raise RuntimeError("pinned KV blocks in host memory differ from those being loaded")
        if any(block not in self._blocks for block in self._num_pins):
            raise RuntimeError("a KV block in host memory was evicted while it was loaded")

    @property
    def num_loads(self) -> int:
        """Number of requests that load blocks."""
        return len(self._loads)

    def _evict(self, own: set[int]) -> bool:
        """Evicts the least recently used block that is neither pinned nor in `own`, if any."""
        for block in self._blocks:
            if block in own:
                # This request's blocks are the most recently used ones.
                return False
            if block not in self._num_pins:
                del self._blocks[block]
                self._changes.remove(block)
                return True
        return False
