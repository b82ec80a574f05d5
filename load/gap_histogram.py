"""Durations counted in narrow buckets: there are too many to keep."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

# A bucket is so much wider than the one below it.
_WIDTH = math.log(1.005)
_LEAST_S = 1e-6
# A long run of steps is counted in so many parts.
_PARTS = 8


class GapHistogram:
    """Durations by how many there were; its memory is that of a few thousand buckets at most."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._since: Counter[int] = Counter()

    @classmethod
    def of_all(cls, tallies: Iterable[GapHistogram]) -> GapHistogram:
        """What all of them have counted."""
        found = cls()
        for one in tallies:
            found._counts.update(one._counts)
        return found

    def gaps(self, first_s: float, spread_s: float, count: int) -> None:
        """So many gaps, from `first_s` to `first_s + spread_s`, evenly."""
        if count <= 0:
            return
        if spread_s < first_s * 0.005:
            self.add(first_s + spread_s / 2, count)
            return
        for part in range(_PARTS):
            number = count * (part + 1) // _PARTS - count * part // _PARTS
            self.add(first_s + spread_s * (part + 0.5) / _PARTS, number)

    def add(self, seconds: float, count: int = 1) -> None:
        bucket = math.floor(math.log(max(_LEAST_S, seconds)) / _WIDTH)
        self._counts[bucket] += count
        self._since[bucket] += count

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    def percentile(self, percent: float) -> float:
        """Seconds, within 0.5 %; nan of nothing."""
        return _percentile(self._counts, percent)

    def share_within(self, seconds: float) -> float:
        """Of all durations; nan of nothing."""
        limit = math.floor(math.log(max(_LEAST_S, seconds)) / _WIDTH)
        total = self.total
        within = sum(count for bucket, count in self._counts.items() if bucket < limit)
        return within / total if total else math.nan

    def latest(self, percent: float) -> float:
        """The percentile of what came since this was last asked."""
        found = _percentile(self._since, percent)
        self._since.clear()
        return found


def _percentile(counts: Counter[int], percent: float) -> float:
    left = percent / 100 * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return math.exp((bucket + 0.5) * _WIDTH)
    return math.nan
