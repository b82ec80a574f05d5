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
    """

    __slots__ = ("_recent", "_total_of_squares", "ordered", "total")

    def __init__(self, window: int) -> None:
        self._recent: deque[_Number] = deque(maxlen=window)
        self.ordered: list[_Number] = []
        self.total: _Number = 0
        self._total_of_squares: _Number = 0

    def __len__(self) -> int:
        return len(self.ordered)

    def add(self, value: _Number) -> None:
        """Adds a value; drops the oldest value if the window is full."""
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            del self.ordered[bisect_left(self.ordered, oldest)]
            self.total -= oldest
            self._total_of_squares -= oldest * oldest
        self._recent.append(value)
        insort(self.ordered, value)
        self.total += value
        self._total_of_squares += value * value

    @property
    def size_biased_mean(self) -> float:
        """The mean in which each value has its own size as its weight; `total` must not be 0.

        For durations, it is the mean of those that are under way at a moment.
        """
        return self._total_of_squares / self.total

    def quantile(self, share: float) -> _Number:
        """The quantile `share` (0 to 1), rounded up to a value; the window must not be empty."""
        return self.ordered[min(len(self.ordered) - 1, int(share * len(self.ordered)))]
