"""The pulls that may still write into staging, and the extents that wait for their end.

A one-sided read can be neither recalled nor fenced: releasing its handle or deregistering its
memory does not stop bytes that are on their way. So an extent that is given up while a pull may
write to it is not free. It is in quarantine: it stays reserved and belongs to its pulls alone,
until the last of them has ended. Pure and synchronous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from baton.kvtransfer.arena import Extent
from baton.kvtransfer.service.receive_state import ReceivedFrame


@dataclass(frozen=True, slots=True)
class OutstandingPull:
    """One pull that has not ended: what it brings, for which handoff, and where it writes."""

    handoff_id: bytes
    shard: int
    frame: ReceivedFrame
    num_bytes: int
    extent: Extent


class OutstandingPulls:
    """All pulls of a receiver that have not ended.

    Args:
        free: Takes each extent that is given up, once nothing can write to it any more.
    """

    def __init__(self, free: Callable[[Extent], None]) -> None:
        self._free = free
        self._pulls: dict[int, OutstandingPull] = {}
        # Number of pulls by the offset of their extent.
        self._numbers: Counter[int] = Counter()
        # Extents that were given up, and when, by their offset.
        self._quarantine: dict[int, tuple[Extent, float]] = {}
        self._last_serial = 0

    def begin(self, pull: OutstandingPull) -> int:
        """Adds a pull, and returns its serial number."""
        self._last_serial += 1
        self._pulls[self._last_serial] = pull
        self._numbers[pull.extent.offset] += 1
        return self._last_serial

    def end(self, serial: int) -> OutstandingPull | None:
        """Removes a pull that has ended; returns None if its end was reported already."""
        pull = self._pulls.pop(serial, None)
        if pull is None:
            return None
        offset = pull.extent.offset
        self._numbers[offset] -= 1
        if not self._numbers[offset]:
            del self._numbers[offset]
            if (kept := self._quarantine.pop(offset, None)) is not None:
                self._free(kept[0])
        return pull

    def writes_to(self, extent: Extent) -> bool:
        """Returns whether a pull may still write to an extent."""
        return extent.offset in self._numbers

    def give_up(self, extent: Extent, now: float) -> None:
        """Frees an extent that its handoff no longer uses: now, or when its last pull has ended."""
        if self.writes_to(extent):
            self._quarantine[extent.offset] = extent, now
        else:
            self._free(extent)

    def quarantined_since(self) -> Iterator[tuple[Extent, float]]:
        """Yields the extents that wait for the end of pulls, and when they were given up."""
        yield from self._quarantine.values()

    @property
    def num_quarantined(self) -> int:
        """Number of extents that wait for the end of pulls."""
        return len(self._quarantine)

    def __iter__(self) -> Iterator[OutstandingPull]:
        return iter(self._pulls.values())

    def check_integrity(self, held: Sequence[Extent]) -> None:
        """Raises AssertionError unless each pull writes to an extent that no other handoff may get.

        Args:
            held: The extents of live handoffs.
        """
        assert Counter(pull.extent.offset for pull in self) == self._numbers
        assert self._numbers.keys() >= self._quarantine.keys()
        reserved = [*held, *(extent for extent, _ in self._quarantine.values())]
        assert all(any(pull.extent is each for each in reserved) for pull in self)
