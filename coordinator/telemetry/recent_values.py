"""Sliding window over the latest values, sorted so that quantiles are exact."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from typing import Generic, TypeVar

_Number = TypeVar("_Number", int, float)


class RecentValues(Generic[_Number]):
    """Exact running quantiles of the latest `window` values.

    Args:
        window: Number of values kept.

    Attributes:
        ordered: the values in ascending order; read-only for callers.
        total: sum of the values.
        total_of_squares: sum of their squares.
    """

    __slots__ = ("_recent", "ordered", "total", "total_of_squares")

    def __init__(self, window: int) -> None:
        self._recent: deque[_Number] = deque(maxlen=window)
        self.ordered: list[_Number] = []
        self.total: _Number = 0
        self.total_of_squares: _Number = 0

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, value: _Number) -> None:
        """Adds a value; drops the oldest value if the window is full."""
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
            self.total_of_squares -= oldest * oldest
        self._recent.append(value)
        insort(self.ordered, value)
        self.total += value
        self.total_of_squares += value * value

    def quantile(self, share: float) -> _Number:
        """The quantile `share` (0 to 1), rounded up to a value; the window must not be empty."""
        return self.ordered[min(len(self.ordered) - 1, int(share * len(self.ordered)))]
