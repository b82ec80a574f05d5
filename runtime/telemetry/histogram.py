"""A histogram with cumulative buckets for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Counts values by upper bound; may be read from another thread.

    Attributes:
        bounds: Upper bounds, ascending; one more bucket counts larger values.
        counts: Count per bucket, not cumulative.
        total: Sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Adds `count` observations of one value, in O(log buckets)."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and cumulative count per bucket, as HistogramMetricFamily takes them."""
        total, found = 0, list[tuple[str, float]]()
        for bound, count in zip((*self.bounds, None), tuple(self.counts), strict=True):
            total += count
            found.append(("+Inf" if bound is None else str(bound), total))
        return found
