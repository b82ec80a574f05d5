"""Blocks that one tier of an engine's KV cache has got and lost since its last report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Change of one tier of an engine's KV blocks, by block hash (runtime/prompts/block_hashes.py).

    An engine with other hashes computes these hashes for its report. The order of events is:
    `cleared`, then `removed`, then `stored`. A block is stored after the block before it and
    removed before that block.

    Attributes:
        stored: Blocks that requests may find from now on; each holds one full block of tokens.
        removed: Blocks that the cache no longer holds.
        cleared: True if the cache holds no block that was reported before.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    cleared: bool = False


class BlockChanges:
    """Blocks that were stored and removed since the last report, each in order.

    A block is stored only while the tier lacks it, and removed only while the tier has it: what was
    stored and removed again, or the reverse, is not reported.
    """

    def __init__(self) -> None:
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._cleared = False

    def store(self, block_hash: int) -> None:
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def remove(self, block_hash: int) -> None:
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def clear(self) -> None:
        self._stored, self._removed, self._cleared = {}, {}, True

    def take(self) -> CacheChange | None:
        """Returns the changes since the last call; None for no change."""
        if not (self._stored or self._removed or self._cleared):
            return None
        change = CacheChange(list(self._stored), list(self._removed), self._cleared)
        self._stored, self._removed, self._cleared = {}, {}, False
        return change
