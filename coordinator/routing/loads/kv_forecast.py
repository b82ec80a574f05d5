"""Forecasts how many KV tokens decodes hold after further steps.

A decode grows by one token with each step and frees its tokens when it ends. Those of one worker
end at different times, so together they never hold the sum of their largest sizes. A worker is full
when the largest expected sum over all later steps reaches its KV cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from operator import add, sub
from typing import NamedTuple

# Ratio of an offset to the one before it, and the largest offset.
_RATIO, _LONGEST = 1.25, 2**17
# Standard errors of the sum that are kept free on every worker, and on a worker while another one
# can take a decode.
_MARGIN, _SAFE_MARGIN = 2.0, 3.0
# A forecast is renewed after this many tokens, or after this share of the output so far if that is
# more: by then, the output has shown that it is a longer one.
_RENEWED_AFTER, _RENEWED_SHARE = 64, 1 / 8


def _offsets() -> tuple[int, ...]:
    grown = (round(16 * _RATIO**number) for number in itertools.count())
    return (0, *itertools.takewhile(lambda offset: offset < _LONGEST, grown))


OFFSETS = _offsets()
"""Numbers of steps from now for which forecasts hold."""
# Steps until the middle between an offset and the next one.
_MIDDLES = tuple((one + other) // 2 for one, other in itertools.pairwise((*OFFSETS, _LONGEST)))


class KvForecast(NamedTuple):
    """KV tokens of one decode after each of OFFSETS.

    The numbers are whole, so that sums stay exact when decodes join and leave.

    Attributes:
        num_tokens: tokens that it holds now.
        means: expected tokens; a decode that has ended holds none.
        variances: variances of the tokens.
        renew_at: tokens of the decode from which a new forecast is due.
    """

    num_tokens: int
    means: tuple[int, ...]
    variances: tuple[int, ...]
    renew_at: float

    @classmethod
    def of(cls, num_tokens: int, num_output: int, goes_on: Callable[[int], float]) -> KvForecast:
        """Returns the forecast for a decode.

        Args:
            num_tokens: KV tokens that it holds now.
            num_output: output tokens among them.
            goes_on: Returns the probability that the output has more than so many further tokens.
        """
        means, variances = [], []
        for offset, middle in zip(OFFSETS, _MIDDLES, strict=True):
            share = goes_on(offset)
            if not share:
                break
            size = num_tokens + middle
            means.append(round(share * size))
            variances.append(round(share * (1 - share) * size * size))
        rest = (0,) * (len(OFFSETS) - len(means))
        renew_at = num_tokens + max(_RENEWED_AFTER, _RENEWED_SHARE * num_output)
        return cls(num_tokens, (*means, *rest), (*variances, *rest), renew_at)

    @classmethod
    def constant(cls, num_tokens: int) -> KvForecast:
        """Returns the forecast for a decode that always holds this many tokens."""
        return cls(num_tokens, (num_tokens,) * len(OFFSETS), (0,) * len(OFFSETS), math.inf)


class KvForecasts:
    """Sums the forecasts of a worker's decodes.

    Attributes:
        peak_tokens: KV tokens that the decodes need at most, with a small margin.
        safe_tokens: the same with a large margin.
    """

    __slots__ = ("_means", "_num", "_peak", "_safe", "_tokens", "_variances")

    def __init__(self) -> None:
        # Number of decodes, and the tokens that they hold now.
        self._num = self._tokens = 0
        self._means = [0] * len(OFFSETS)
        self._variances = [0] * len(OFFSETS)
        self._peak: int | None = 0
        self._safe: int | None = 0

    def add(self, forecast: KvForecast) -> None:
        self._num += 1
        self._tokens += forecast.num_tokens
        self._means = list(map(add, self._means, forecast.means))
        self._variances = list(map(add, self._variances, forecast.variances))
        self._peak = self._safe = None

    def remove(self, forecast: KvForecast) -> None:
        """Removes a forecast that was added."""
        self._num -= 1
        self._tokens -= forecast.num_tokens
        self._means = list(map(sub, self._means, forecast.means))
        self._variances = list(map(sub, self._variances, forecast.variances))
        self._peak = self._safe = None

    @property
    def peak_tokens(self) -> int:
        if self._peak is None:
            self._peak = self._most_tokens(_MARGIN)
        return self._peak

    @property
    def safe_tokens(self) -> int:
        if self._safe is None:
            self._safe = self._most_tokens(_SAFE_MARGIN)
        return self._safe

    def _most_tokens(self, margin: float) -> int:
        return math.ceil(
            max(
                # Not more than if all go on.
                min(mean + margin * math.sqrt(variance), self._tokens + self._num * middle)
                for mean, variance, middle in zip(
                    self._means, self._variances, _MIDDLES, strict=True
                )
            )
        )
