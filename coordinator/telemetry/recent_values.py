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
        """Mean in which each value is weighted by its own size; `total` must not be 0.

        For durations this is the mean duration of the processes that run at a random moment:
        longer ones are more likely to be running (inspection paradox).
        """
        return self._total_of_squares / self.total

    def quantile(self, share: float) -> _Number:
        """Returns the quantile `share` (0 to 1) without interpolation; needs at least one value.

        More than this share of the values are at most as large; for 1 it is the largest value.
        """
        return self.ordered[min(len(self.ordered) - 1, int(share * len(self.ordered)))]
