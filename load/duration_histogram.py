"""A histogram of durations with narrow logarithmic buckets.

One run can have many millions of gaps between tokens, too many to keep each of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

# Each bucket is 0.5 % wider than the bucket below; that is the error of a percentile.
_WIDTH = math.log(1.005)
_SMALLEST_S = 1e-6
# Number of durations that represent a linear range in `add_evenly`.
_PARTS = 8


class DurationHistogram:
    """Counts durations by bucket; uses a few thousand buckets at most."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        # Counts since the last call of `percentile_since_last`.
        self._recent: Counter[int] = Counter()

    @classmethod
    def merged(cls, histograms: Iterable[DurationHistogram]) -> DurationHistogram:
        """Returns a histogram with the sum of all counts."""
        found = cls()
        for one in histograms:
            found._counts.update(one._counts)
        return found

    def add_evenly(self, first_s: float, spread_s: float, count: int) -> None:
        """Adds `count` durations that rise evenly from `first_s` to `first_s + spread_s`."""
        if count <= 0:
            return
        if spread_s < first_s * 0.005:
            self.add(first_s + spread_s / 2, count)
            return
        for part in range(_PARTS):
            number = count * (part + 1) // _PARTS - count * part // _PARTS
            self.add(first_s + spread_s * (part + 0.5) / _PARTS, number)

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = math.floor(math.log(max(_SMALLEST_S, seconds)) / _WIDTH)
        self._counts[bucket] += count
        self._recent[bucket] += count

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def percentile(self, percent: float) -> float:
        """Returns the percentile in seconds, exact to 0.5 %; nan if the histogram is empty."""
        return _percentile(self._counts, percent)

    def share_within(self, seconds: float) -> float:
        """Returns the share of durations below `seconds`; nan if the histogram is empty."""
        limit = math.floor(math.log(max(_SMALLEST_S, seconds)) / _WIDTH)
        total = self.total
        within = sum(count for bucket, count in self._counts.items() if bucket < limit)
        return within / total if total else math.nan

    def percentile_since_last(self, percent: float) -> float:
        """Returns the percentile of the durations added since the last call of this method."""
        found = _percentile(self._recent, percent)
        self._recent.clear()
        return found


def _percentile(counts: Counter[int], percent: float) -> float:
    left = percent / 100 * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return math.exp((bucket + 0.5) * _WIDTH)
    return math.nan
