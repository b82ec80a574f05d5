"""The virtual clock of simulated cells, and the arrivals of a trace."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from baton.load.traces import Arrival

# Virtual time when a trace begins.
START_S = 1000.0


class VirtualTime(ABC):
    """Calls at virtual times, in order of time; calls at the same time in the order of `at`.

    Attributes:
        now: Virtual time in seconds.
        scheduled: Heap of (time, order, function, arguments); the cell takes them out.
    """

    def __init__(self) -> None:
        self.now = START_S
        self.scheduled: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []
        self._order = itertools.count()

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Schedules a call at virtual time `when`."""
        heapq.heappush(self.scheduled, (when, next(self._order), action, arguments))

    def next_arrival(self, arrivals: Iterator[Arrival], number: int) -> None:
        """Schedules the next request of a trace; only one is scheduled at a time."""
        one = next(arrivals, None)
        if one is not None:
            self.at(START_S + one.at_s, self.arrive, one, arrivals, number)

    @abstractmethod
    def arrive(self, one: Arrival, arrivals: Iterator[Arrival], number: int) -> None:
        """Submits request `number` of the trace, and calls `next_arrival` for the one after it."""
