"""What arrived, interval by interval, and how much will arrive by the time a worker has started."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from baton.coordinator.scaling.autoscale.types import LaneLoad, Sample

# Of the recent load: one that is long enough to tell a change from chance, one short enough to
# follow it.
_SHORT_S, _TREND_S = 30.0, 120.0
# What is kept.
_KEPT_S = 900.0
# A trend may at most so many times the load by the time that it is needed.
_MOST_GROWTH = 2.0
# In standard errors: a slope below this is chance.
_SURE = 2.0
# How many intervals tell how bursty arrivals are, and how bursty they may seem.
_TELLING, _MOST_BURSTS = 12, 4.0
_FIELDS = ("num_arrived", "work_s", "num_output_tokens", "num_kv_tokens")


def sample(
    before: Sequence[tuple[str, LaneLoad]],
    after: Sequence[tuple[str, LaneLoad]],
    lanes: frozenset[str],
    now: float,
    span_s: float,
    num_decodes: int,
) -> Sample | None:
    """What these lanes got between two observations; None when the totals make no sense.

    Totals that fell are a coordinator that started again.
    """
    old = dict(before)
    sums = dict.fromkeys(_FIELDS, 0.0)
    for name, load in after:
        if name not in lanes:
            continue
        earlier = old.get(name, LaneLoad())
        for one in _FIELDS:
            difference = getattr(load, one) - getattr(earlier, one)
            if not (math.isfinite(difference) and difference >= 0):
                return None
            sums[one] += difference
    rate, work, output_tokens, kv_tokens = (sums[one] / span_s for one in _FIELDS)
    present = num_decodes + sum(load.num_waiting for name, load in after if name in lanes)
    return Sample(now, span_s, rate, work, output_tokens, kv_tokens, present)


def kept(samples: Sequence[Sample], now: float) -> tuple[Sample, ...]:
    """Without what is too old, or of a future that a clock has taken back."""
    return tuple(one for one in samples if now - _KEPT_S <= one.at <= now)


def recent(samples: Sequence[Sample], now: float, seconds: float) -> list[Sample]:
    return [one for one in samples if one.at > now - seconds] or list(samples[-1:])


def mean(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """Over time; 0 without samples."""
    span_s = math.fsum(one.span_s for one in samples)
    return math.fsum(value(one) * one.span_s for one in samples) / span_s if span_s > 0 else 0.0


def growth(samples: Sequence[Sample], now: float, lead_s: float) -> float:
    """By what factor the request rate is expected to be higher `lead_s` from now; at least 1.

    A straight line through the last minutes, where it rises by more than such arrivals would by
    chance, damped as in Gardner and McKenzie (1985): it flattens within half the time that it has
    been seen for, since a young rise tells little of what comes after as long again. A load that
    falls is not extrapolated: it may come back before a worker would.
    """
    window = recent(samples, now, max(_TREND_S, lead_s))
    if len(window) < 6:
        return 1.0
    level = mean(window, lambda one: one.rate)
    span_s = math.fsum(one.span_s for one in window)
    if not level > 0:
        return 1.0
    centre = math.fsum(one.at * one.span_s for one in window) / span_s
    spread = math.fsum((one.at - centre) ** 2 * one.span_s for one in window)
    if not spread > 0:
        return 1.0
    slope = math.fsum((one.at - centre) * one.rate * one.span_s for one in window) / spread
    # Of a rate `level`, counted over the window: its variance is level / span in each interval.
    error = math.sqrt(level * burstiness(samples) / spread)
    if slope < _SURE * error:
        return 1.0
    damped_s = span_s / 2 * -math.expm1(-2 * lead_s / span_s)
    ahead = level + (slope - error) * (now + damped_s - centre)
    return min(_MOST_GROWTH, max(1.0, ahead / load(samples, now, lambda one: one.rate)))


def load(samples: Sequence[Sample], now: float, value: Callable[[Sample], float]) -> float:
    """Per second now: what has lasted, as far as what is recent differs from it by chance only.

    What is recent counts where it exceeds one standard error, and where it falls short of two: a
    worker too few costs more than one too many. Of n requests that differ in size as much as they
    do in traces (a coefficient of variation of 1), and come in bursts, the sum varies by
    sqrt((1 + burstiness) / n).
    """
    short, long = recent(samples, now, _SHORT_S), recent(samples, now, _TREND_S)
    lately, lasting = mean(short, value), mean(long, value)
    count = math.fsum(one.rate * one.span_s for one in long) * _SHORT_S / _TREND_S
    if not count > 0:
        return lasting
    chance = lasting * math.sqrt((1 + burstiness(samples)) / count)
    return min(max(lasting, lately - chance), lately + _SURE * chance)


def burstiness(samples: Sequence[Sample]) -> float:
    """How much more the number of requests varies than that of independent ones; 1 to 4.

    The index of dispersion of counts, from differences between neighbours, so that a slow change
    does not count; each by the spans of its own two, which differ where something asked for a
    decision at once. Few samples tell little.
    """
    if len(samples) < _TELLING or not (level := mean(samples, lambda one: one.rate)) > 0:
        return 1.0
    # Of independent arrivals the difference of two rates varies by level * (1 / span + 1 / span).
    found = math.fsum(
        (after.rate - before.rate) ** 2 / (1 / after.span_s + 1 / before.span_s)
        for before, after in itertools.pairwise(samples)
    )
    return min(_MOST_BURSTS, max(1.0, found / (len(samples) - 1) / level))
