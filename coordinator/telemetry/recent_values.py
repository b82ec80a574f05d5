"""The last values of something, kept in order of size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Generic, TypeVar

_Number = TypeVar("_Number", int, float)


class RecentValues(Generic[_Number]):
    """A running quantile: exact, of a bounded number of values.

    Args:
        window: how many values count.

    Attributes:
        ordered: ascending; to be read only from outside.
        total: their sum.
    """

    __slots__ = ("_recent", "ordered", "total")

    def __init__(self, window: int) -> None:
        self._recent: deque[_Number] = deque(maxlen=window)
        self.ordered: list[_Number] = []
        self.total: _Number = 0

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, value: _Number) -> None:
        """The oldest one makes room when the window is full."""
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
        self._recent.append(value)
        insort(self.ordered, value)
        self.total += value

    def quantile(self, share: float) -> _Number:
        """The least value that so much of them does not exceed, or the next; there is one."""
        return self.ordered[min(len(self.ordered) - 1, int(share * len(self.ordered)))]
