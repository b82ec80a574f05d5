"""Timers as data: one deadline per key, and no clock."""

from __future__ import annotations

import heapq
from enum import Enum, auto
from typing import TypeAlias

from baton.coordinator.state.requests import RequestKey, WorkerKey


class CoreTimer(Enum):
    """Timers of the core's own parts.

    Attributes:
        ADOPTION: the next step of waiting for workers that another coordinator had.
        SCALING: the next decision on the sizes of the pools.
        ROLLOUT: the next look at the rollout that runs.
        ROOM: a worker is predicted to have room for a waiting request.
    """

    ADOPTION = auto()
    SCALING = auto()
    ROLLOUT = auto()
    ROOM = auto()

    # Enum's own hash calls Python code; members are compared by identity anyway.
    __hash__ = object.__hash__


TimerKey: TypeAlias = RequestKey | WorkerKey | CoreTimer
"""One timer per request, per attached worker and per CoreTimer."""


class Timers:
    """At most one deadline per key; earliest first. Setting and cancelling cost O(log n).

    Replaced and cancelled entries stay in the heap until they surface, and the heap is rebuilt
    when they outnumber the live ones.
    """

    def __init__(self) -> None:
        self._at: dict[TimerKey, float] = {}
        self._heap: list[tuple[float, int, TimerKey]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: TimerKey) -> bool:
        return key in self._at

    def set(self, key: TimerKey, at: float) -> None:
        if self._at.get(key) == at:
            return
        self._at[key] = at
        self._order += 1
        heapq.heappush(self._heap, (at, self._order, key))
        if len(self._heap) > 64 + 2 * len(self._at):
            self._heap = [(when, n, k) for n, (k, when) in enumerate(self._at.items())]
            self._order = len(self._heap)
            heapq.heapify(self._heap)

    def cancel(self, key: TimerKey) -> None:
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline, None when there is none."""
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> TimerKey | None:
        """Takes out the earliest key whose deadline has come, None when none has."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._at[key]
        return key
