"""Blocks that one tier of an engine's KV cache has got and lost since its last report."""

from __future__ import annotations

from typing import Any


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

    def take(self) -> dict[str, Any] | None:
        """Returns the changes since the last call as fields of CacheChange (engine/base.py)."""
        if not (self._stored or self._removed or self._cleared):
            return None
        change = {
            "stored": list(self._stored),
            "removed": list(self._removed),
            "cleared": self._cleared,
        }
        self._stored, self._removed, self._cleared = {}, {}, False
        return change
