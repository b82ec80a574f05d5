"""An index of workers by load: the least loaded, at a cost that hardly grows with their number."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class LeastLoaded(Generic[Key]):
    """One load per key. Setting and asking cost O(log n).

    Of equal loads the one that changed longest ago comes first, so that idle workers take turns;
    setting what it was is no change.
    Replaced entries stay in the heap until they surface, and the heap is rebuilt when they
    outnumber the live ones.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def set(self, key: Key, load: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] == load:
            return  # It keeps its turn.
        self._order += 1
        self._entries[key] = load, self._order
        item = (load, self._order, key)
        if self._heap and self._heap[0][2] == key:
            # Its old entry would only be thrown away later.
            heapq.heapreplace(self._heap, item)
        else:
            heapq.heappush(self._heap, item)
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(at, order, k) for k, (at, order) in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, key: Key) -> None:
        """Idempotent."""
        self._entries.pop(key, None)

    def least(self) -> Key | None:
        """The key with the least load; None when there is none."""
        heap, entries = self._heap, self._entries
        while heap:
            load, order, key = heap[0]
            if entries.get(key) == (load, order):
                return key
            heapq.heappop(heap)
        return None
