"""Overwrites the bytes of earlier handoffs in staging, after an operator has deleted KV blocks.

Bytes of an extent stay in staging until another handoff gets the place. An erasure overwrites all
free bytes, and those of extents in use as soon as they are freed. It goes through the arena in
small steps, because the service has one thread. Pure and synchronous.
"""

from __future__ import annotations

from collections import deque

from baton.kvtransfer.arena import Arena, Extent, aligned

# Most bytes that one step looks at: 1 or 2 ms.
STEP_BYTES = 8 * 2**20
_ZEROS = bytes(2**20)


class StagingEraser:
    """Overwrites the free bytes of one arena.

    Args:
        arena: The arena; this object does not change it.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # Ranges whose free bytes are not overwritten yet, as (begin, end).
        self._ranges: deque[tuple[int, int]] = deque()
        # Offsets of extents that were in use, and are overwritten when they are freed.
        self._in_use: set[int] = set()

    def begin(self) -> None:
        """Begins to overwrite the whole arena."""
        self._ranges.clear()
        self._ranges.append(self._arena.bounds)

    def freed(self, extent: Extent) -> None:
        """Takes every extent that was just freed."""
        if extent.offset in self._in_use:
            self._in_use.remove(extent.offset)
            self._ranges.append((extent.offset, extent.offset + aligned(extent.size_bytes)))

    @property
    def has_work(self) -> bool:
        """Whether free bytes are to be overwritten."""
        return bool(self._ranges)

    def step(self, memory: memoryview) -> None:
        """Overwrites the free bytes among the next STEP_BYTES bytes.

        Args:
            memory: The whole segment.
        """
        if not self._ranges:
            return
        begin, end = self._ranges.popleft()
        if end - begin > STEP_BYTES:
            self._ranges.appendleft((begin + STEP_BYTES, end))
            end = begin + STEP_BYTES
        free, used = self._arena.within(begin, end)
        self._in_use.update(extent.offset for extent in used)
        for first, last in free:
            for at in range(first, last, len(_ZEROS)):
                size = min(len(_ZEROS), last - at)
                memory[at : at + size] = _ZEROS[:size]
