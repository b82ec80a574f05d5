"""Forecasts the load at the end of a cold start from the load history."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from baton.coordinator.scaling.autoscale.types import Sample

# Two windows over the recent load: the short one follows changes quickly, the long one is needed to
# distinguish a change from random variation.
_SHORT_S, _TREND_S = 30.0, 120.0
# Upper limit of the forecast growth factor.
_MAX_GROWTH = 2.0
# Significance limit in standard errors: a smaller slope is considered random variation.
_SIGNIFICANCE = 2.0
# Minimum number of intervals for estimating burstiness, and upper limit of the estimate.
_MIN_INTERVALS, _MAX_BURSTINESS = 12, 4.0


def recent(samples: Sequence[Sample], now: float, seconds: float) -> list[Sample]:
    return [one for one in samples if one.at > now - seconds] or list(samples[-1:])


def mean(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """Mean weighted by the samples' duration; 0 without samples."""
    span_s = math.fsum(one.span_s for one in samples)
    return math.fsum(value(one) * one.span_s for one in samples) / span_s if span_s > 0 else 0.0


def growth(samples: Sequence[Sample], now: float, lead_s: float) -> float:
    """Predicted growth factor of the request rate within `lead_s` seconds; at least 1.

    The forecast is a straight line fitted to the last minutes, used only if its slope is larger
    than random variation would explain. The trend is damped as in Gardner and McKenzie (1985) with
    a time constant of half the window, because a short rise does not predict a long one. A falling
    load is not extrapolated: it may rise again sooner than a worker could start.
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
    # Standard error of the slope: for Poisson arrivals of rate `level`, the variance of the rate
    # measured in an interval is level / span.
    error = math.sqrt(level * burstiness(samples) / spread)
    if slope < _SIGNIFICANCE * error:
        return 1.0
    damped_s = span_s / 2 * -math.expm1(-2 * lead_s / span_s)
    ahead, present = level + (slope - error) * (now + damped_s - centre), load(samples, now, _rate)
    # The window may be longer than the one that the present load is measured in.
    return min(_MAX_GROWTH, max(1.0, ahead / present)) if present > 0 else 1.0


def _rate(sample: Sample) -> float:
    return sample.rate


def load(samples: Sequence[Sample], now: float, value: Callable[[Sample], float]) -> float:
    """Present load per second: the long-term mean, corrected by significant recent changes.

    The short-term mean raises the result if it is more than one standard error above the long-term
    mean, and lowers it if it is more than two below: a missing worker costs more than a spare one.
    The relative standard error of the sum of n request sizes is sqrt((1 + burstiness) / n), for
    sizes with a coefficient of variation of 1 as observed in traces.
    """
    short, long = recent(samples, now, _SHORT_S), recent(samples, now, _TREND_S)
    lately, lasting = mean(short, value), mean(long, value)
    count = math.fsum(one.rate * one.span_s for one in long) * _SHORT_S / _TREND_S
    if not count > 0:
        return lasting
    chance = lasting * math.sqrt((1 + burstiness(samples)) / count)
    return min(max(lasting, lately - chance), lately + _SIGNIFICANCE * chance)


def burstiness(samples: Sequence[Sample]) -> float:
    """Variance of the request count relative to Poisson arrivals; 1 to 4.

    This is the index of dispersion of counts, computed from differences between adjacent samples so
    that slow changes do not count. Each difference is scaled by the durations of its two samples,
    which differ when an event caused an early decision. With too few samples the result is 1.
    """
    if len(samples) < _MIN_INTERVALS or not (level := mean(samples, lambda one: one.rate)) > 0:
        return 1.0
    # For Poisson arrivals the variance of the difference of two rates is
    # level * (1 / span + 1 / span).
    found = math.fsum(
        (after.rate - before.rate) ** 2 / (1 / after.span_s + 1 / before.span_s)
        for before, after in itertools.pairwise(samples)
    )
    return min(_MAX_BURSTINESS, max(1.0, found / (len(samples) - 1) / level))
