"""The handoffs that wait for an extent of staging, in order of arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from baton.kvtransfer.arena import Arena, ArenaStatistics, Extent
from baton.kvtransfer.errors import NoRoom
from baton.kvtransfer.service.staging_eraser import StagingEraser


class StagingQueue:
    """Gives extents of an arena to handoffs, first come, first served.

    A handoff that needs a large extent is not overtaken by smaller ones, so it gets its room.

    Args:
        arena: The arena; this object is its only user.

    Attributes:
        eraser: Overwrites freed extents when an operator has deleted KV blocks.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.eraser = StagingEraser(arena)
        # Bytes that each waiting handoff needs, by handoff ID, in order of arrival.
        self._waiting: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, handoff_id: bytes) -> bool:
        return handoff_id in self._waiting

    def add(self, handoff_id: bytes, num_bytes: int, *, first: bool = False) -> None:
        """Adds a handoff; a handoff that is already waiting keeps its place.

        Args:
            handoff_id: ID of the handoff.
            num_bytes: Bytes that it needs.
            first: Whether it goes before all others, because it had an extent before.
        """
        self._waiting[handoff_id] = num_bytes
        if first:
            self._waiting.move_to_end(handoff_id, last=False)

    def remove(self, handoff_id: bytes) -> None:
        """Removes a handoff that no longer needs staging. Idempotent."""
        self._waiting.pop(handoff_id, None)

    def admit(self) -> Iterator[tuple[bytes, Extent]]:
        """Takes each handoff that has room now off the queue, and yields it with its extent."""
        while self._waiting:
            handoff_id, num_bytes = next(iter(self._waiting.items()))
            try:
                extent = self._arena.allocate(num_bytes)
            except NoRoom:
                return
            del self._waiting[handoff_id]
            yield handoff_id, extent

    def free(self, extent: Extent) -> None:
        """Returns an extent to the arena; `admit` may then have work."""
        self._arena.free(extent)
        self.eraser.freed(extent)

    def fits_ever(self, num_bytes: int) -> bool:
        """Returns whether an empty arena has room for this many bytes."""
        return self._arena.fits_ever(num_bytes)

    def statistics(self) -> ArenaStatistics:
        """Returns the usage of the arena."""
        return self._arena.statistics()

    def check_integrity(self, num_reserved: int) -> None:
        """Raises AssertionError unless this many extents of the arena are reserved."""
        self._arena.check_integrity()
        assert self._arena.statistics().num_extents == num_reserved
