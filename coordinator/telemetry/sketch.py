"""Percentiles of durations, bounded in memory and mergeable."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Of every percentile, relative.
ACCURACY = 0.02
# Shorter and longer durations count as these.
_LEAST_S, _MOST_S = 1e-6, 1e5
_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_SCALE = 1 / math.log(_GROWTH)
_MIDDLE = 2 / (1 + _GROWTH)


class Sketch:
    """Counts by logarithmic bucket: 633 at most, whatever is observed.

    DDSketch (Masson, Rim, Lee, VLDB 2019) with fixed bounds in the place of collapsing buckets.

    Attributes:
        counts: by bucket; bucket k holds what is over _GROWTH^(k-1) and at most _GROWTH^k.
        num: how many values.
        total_s: their sum.
        max_s: the largest; 0 of none.
    """

    __slots__ = ("counts", "max_s", "num", "total_s")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.num = 0
        self.total_s = self.max_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """Adds a value, so many times."""
        bounded_s = value_s
        if not _LEAST_S <= value_s <= _MOST_S:
            bounded_s = min(max(value_s, _LEAST_S), _MOST_S)
        bucket = math.ceil(math.log(bounded_s) * _SCALE)
        self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num += count
        self.total_s += value_s * count
        if value_s > self.max_s:
            self.max_s = value_s

    def add(self, other: Sketch) -> None:
        """Adds all values of another one."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num += other.num
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)

    def percentiles_s(self, percents: Iterable[float]) -> list[float]:
        """The least values that so much of the whole does not exceed; 0 of none.

        Args:
            percents: ascending, 0 to 100.
        """
        found, seen = list[float](), 0
        buckets = iter(sorted(self.counts.items()))
        bucket = 0
        for percent in percents:
            wanted = max(1, math.ceil(percent / 100 * self.num))
            while seen < min(wanted, self.num):
                bucket, count = next(buckets)
                seen += count
            found.append(min(_GROWTH**bucket * _MIDDLE, self.max_s) if self.num else 0.0)
        return found

    def num_over(self, limit_s: float) -> int:
        """How many values are larger, by the middle of their buckets."""
        return sum(
            count for bucket, count in self.counts.items() if _GROWTH**bucket * _MIDDLE > limit_s
        )
