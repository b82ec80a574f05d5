"""Percentile sketch of durations with bounded memory; sketches can be merged."""

from __future__ import annotations

import math
from collections.abc import Iterable

# Relative error of every percentile.
ACCURACY = 0.02
# Durations outside these limits are counted as the nearest limit.
_MIN_S, _MAX_S = 1e-6, 1e5
_GROWTH = (1 + ACCURACY) / (1 - ACCURACY)
_SCALE = 1 / math.log(_GROWTH)
_MIDDLE_OF_BUCKET = 2 / (1 + _GROWTH)


class Sketch:
    """Counts of values in at most 633 logarithmic buckets.

    DDSketch (Masson, Rim, Lee, VLDB 2019) with fixed bounds instead of collapsing buckets.

    Attributes:
        counts: number of values by bucket; bucket k holds values over _GROWTH^(k-1) and up to
            _GROWTH^k.
        num: number of values.
        total_s: sum of the values.
        max_s: largest value; 0 without values.
    """

    __slots__ = ("counts", "max_s", "num", "total_s")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.num = 0
        self.total_s = self.max_s = 0.0

    def observe(self, value_s: float, count: int = 1) -> None:
        """Adds a value `count` times."""
        bounded_s = value_s
        if not _MIN_S <= value_s <= _MAX_S:
            bounded_s = min(max(value_s, _MIN_S), _MAX_S)
        bucket = math.ceil(math.log(bounded_s) * _SCALE)
        self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num += count
        self.total_s += value_s * count
        if value_s > self.max_s:
            self.max_s = value_s

    def add(self, other: Sketch) -> None:
        """Adds all values of another sketch."""
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count
        self.num += other.num
        self.total_s += other.total_s
        self.max_s = max(self.max_s, other.max_s)

    def percentiles_s(self, percents: Iterable[float]) -> list[float]:
        """Returns percentiles; 0 for a sketch without values.

        Args:
            percents: percentiles to return (0 to 100), in ascending order.
        """
        found, seen = list[float](), 0
        buckets = iter(sorted(self.counts.items()))
        bucket = 0
        for percent in percents:
            wanted = max(1, math.ceil(percent / 100 * self.num))
            while seen < min(wanted, self.num):
                bucket, count = next(buckets)
                seen += count
            found.append(min(_GROWTH**bucket * _MIDDLE_OF_BUCKET, self.max_s) if self.num else 0.0)
        return found

    def num_over(self, limit_s: float) -> int:
        """Number of values over a limit; a value is taken as the middle of its bucket."""
        return sum(
            count
            for bucket, count in self.counts.items()
            if _GROWTH**bucket * _MIDDLE_OF_BUCKET > limit_s
        )
