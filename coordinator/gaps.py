"""The gaps between one stream's tokens, in bounded memory."""

from __future__ import annotations

from array import array

_MAX_SAMPLES = 512


class Gaps:
    """Median and maximum of a request's gaps between outputs.

    Keeps every gap up to a bound, then every second one, then every fourth: the median of a long
    stream is that of an even sample of it.

    Attributes:
        max_us: the longest gap, exact.
    """

    __slots__ = ("_samples", "_seen", "_stride", "max_us")

    def __init__(self) -> None:
        self._samples = array("Q")
        self._seen, self._stride, self.max_us = 0, 1, 0

    def add(self, gap_us: int) -> None:
        if gap_us > self.max_us:
            self.max_us = gap_us
        if self._seen % self._stride == 0:
            if len(self._samples) == _MAX_SAMPLES:
                self._samples = self._samples[::2]
                self._stride *= 2
            if self._seen % self._stride == 0:
                self._samples.append(gap_us)
        self._seen += 1

    @property
    def p50_us(self) -> int:
        """0 when there are no gaps."""
        if not self._samples:
            return 0
        ordered = sorted(self._samples)
        return ordered[(len(ordered) - 1) // 2]
