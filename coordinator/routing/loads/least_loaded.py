"""An index of workers by load that returns the least loaded worker in O(log n)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeAlias, TypeVar

Key = TypeVar("Key", bound=Hashable)
# Load of a key, and the number of the change that gave it this load.
Position: TypeAlias = tuple[float, int]


class LeastLoaded(Generic[Key]):
    """A heap with one load per key; `set` and `least` cost O(log n).

    Among keys with equal loads the key whose load changed longest ago comes first, so that idle
    workers take turns. Setting the same load again does not count as a change.
    Replaced entries stay in the heap until they reach the top. The heap is rebuilt when it holds
    more than twice as many replaced entries as live entries.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def load(self, key: Key) -> float | None:
        """The load of a key; None if the index does not contain the key."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def set(self, key: Key, load: float) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] == load:
            return  # The key keeps its position among keys with equal loads.
        self._order += 1
        self._put(key, load, self._order)

    def position(self, key: Key) -> Position | None:
        """The key's place in the index, for `restore`; None if the index does not contain it."""
        return self._entries.get(key)

    def restore(self, key: Key, position: Position | None) -> None:
        """Gives a key its former place among keys with equal loads.

        Ignored if the index did not contain the key, does not contain it now, or if its load has
        changed.
        """
        entry = self._entries.get(key)
        if entry is not None and position is not None and entry[0] == position[0]:
            self._put(key, *position)

    def _put(self, key: Key, load: float, order: int) -> None:
        self._entries[key] = load, order
        item = (load, order, key)
        if self._heap and self._heap[0][2] == key:
            # Replacing the outdated top entry saves a later heappop.
            heapq.heapreplace(self._heap, item)
        else:
            heapq.heappush(self._heap, item)
        if len(self._heap) > 64 + 2 * len(self._entries):
            self._heap = [(at, order, k) for k, (at, order) in self._entries.items()]
            heapq.heapify(self._heap)

    def remove(self, key: Key) -> None:
        """Removes a key; idempotent."""
        self._entries.pop(key, None)

    def least(self) -> Key | None:
        """The key with the least load; None if the index is empty."""
        heap, entries = self._heap, self._entries
        while heap:
            load, order, key = heap[0]
            if entries.get(key) == (load, order):
                return key
            heapq.heappop(heap)
        return None
