"""The figures of bench/neighbours.py."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

# Number of gaps before a prompt that say how long a gap is without it.
NUM_BEFORE = 16

KINDS = (
    "computed, stored",
    "computed, no store",
    "cached",
    "from host memory",
    "fetched",
)
# The comparison of each pair of rows.
DIFFERENCES = {
    "a store": ("computed, stored", "computed, no store"),
    "a load from host memory": ("from host memory", "cached"),
    "a fetch": ("fetched", "cached"),
}


@dataclass(frozen=True, slots=True)
class Delay:
    """Effects of one prompt on the streams beside it, in ms."""

    longest_gap_ms: float
    delay_ms: float


def delay_of(times: Sequence[float], begin: int) -> Delay:
    """Returns the delay from a token on, by a stream's tokens.

    Args:
        times: Arrival of each token of a stream, in seconds.
        begin: Index of the last token before the prompt came; at least 2.
    """
    gaps = [(after - before) * 1e3 for before, after in pairwise(times)]
    usual = statistics.median(gaps[max(0, begin - NUM_BEFORE) : begin])
    beside = gaps[begin:]
    return Delay(max(beside), sum(gap - usual for gap in beside))


def report(found: Mapping[str, Sequence[Delay]]) -> dict[str, Any]:
    """Returns medians of each kind, and of the differences of prompts with the same number."""

    def medians(delays: Sequence[tuple[float, float]]) -> dict[str, float]:
        longest, sums = zip(*delays, strict=True)
        return {
            "longest_gap_ms": round(statistics.median(longest), 2),
            "delay_ms": round(statistics.median(sums), 2),
        }

    values = {
        kind: [(one.longest_gap_ms, one.delay_ms) for one in delays]
        for kind, delays in found.items()
    }
    added = {
        name: medians(
            [
                (more[0] - less[0], more[1] - less[1])
                for more, less in zip(values[one], values[other], strict=True)
            ]
        )
        for name, (one, other) in DIFFERENCES.items()
    }
    return {"kinds": {kind: medians(one) for kind, one in values.items()}, "added": added}
