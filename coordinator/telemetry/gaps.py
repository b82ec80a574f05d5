"""The gaps between one stream's tokens, as its latency budget tells of them."""

from __future__ import annotations

from collections.abc import Sequence

# Of a longer stream the median is that of an even sample.
_MAX_SAMPLES = 1024


def median_us(gaps_us: Sequence[int]) -> int:
    """The lower median; 0 when there are no gaps."""
    ordered = sorted(gaps_us[:: len(gaps_us) // _MAX_SAMPLES + 1])
    return ordered[(len(ordered) - 1) // 2] if ordered else 0
