"""Median of the gaps between one stream's tokens, for its latency budget."""

from __future__ import annotations

from collections.abc import Sequence

# For streams with more gaps than this, the median is computed from an even sample.
_MAX_SAMPLES = 1024


def median_us(gaps_us: Sequence[int]) -> int:
    """The lower median; 0 if there are no gaps."""
    ordered = sorted(gaps_us[:: len(gaps_us) // _MAX_SAMPLES + 1])
    return ordered[(len(ordered) - 1) // 2] if ordered else 0
