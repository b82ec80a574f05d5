"""Collects which KV blocks entered or left a tier of the simulated engine, for its reports."""

from __future__ import annotations

from baton.engine.base import CacheChange


class ChangeLog:
    """Net changes of one tier since the last report, in the order of the latest changes."""

    def __init__(self) -> None:
        # Hashes that changed, with whether each is present now.
        self._changed: dict[int, bool] = {}

    def record(self, block_hash: int, *, present: bool) -> None:
        """Records that a block was stored or removed."""
        # The latest change comes last, so that the order of the report is the order of the changes.
        self._changed.pop(block_hash, None)
        self._changed[block_hash] = present

    def take(self) -> CacheChange | None:
        """Returns the changes since the last call; None for no change."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        return CacheChange(
            stored=[one for one, present in changed.items() if present],
            removed=[one for one, present in changed.items() if not present],
        )
