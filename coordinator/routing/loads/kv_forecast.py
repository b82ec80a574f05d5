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
# A forecast is renewed after this many tokens: by then, the output is known to be a longer one.
_RENEWED_AFTER = 32


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
        means: expected tokens; a decode that has ended holds none. Empty: it always holds
            `num_tokens`.
        variances: variances of the tokens.
    """

    num_tokens: int
    means: tuple[int, ...] = ()
    variances: tuple[int, ...] = ()

    @property
    def renew_at(self) -> int:
        """Tokens of the decode from which a new forecast is due."""
        return self.num_tokens + _RENEWED_AFTER if self.means else 0

    @classmethod
    def of(cls, num_tokens: int, goes_on: Callable[[int], float]) -> KvForecast:
        """Returns the forecast for a decode.

        Args:
            num_tokens: KV tokens that it holds now.
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
        return cls(num_tokens, (*means, *rest), (*variances, *rest))


class KvForecasts:
    """Sums the forecasts of a worker's decodes.

    Attributes:
        peak_tokens: KV tokens that the decodes need at most, with a small margin.
        safe_tokens: the same with a large margin.
    """

    __slots__ = ("_constant", "_means", "_num", "_peak", "_safe", "_tokens", "_variances")

    def __init__(self) -> None:
        # Tokens of the decodes that always hold as many.
        self._constant = 0
        # Number of the other decodes, and the tokens that they hold now.
        self._num = self._tokens = 0
        self._means = [0] * len(OFFSETS)
        self._variances = [0] * len(OFFSETS)
        self._peak: int | None = 0
        self._safe: int | None = 0

    def copy(self) -> KvForecasts:
        """Returns sums that change apart from these."""
        made = KvForecasts()
        made._constant, made._num, made._tokens = self._constant, self._num, self._tokens
        made._means, made._variances = self._means, self._variances
        made._peak, made._safe = self._peak, self._safe
        return made

    def add(self, forecast: KvForecast) -> None:
        self._peak = self._safe = None
        if not forecast.means:
            self._constant += forecast.num_tokens
            return
        self._num += 1
        self._tokens += forecast.num_tokens
        self._means = list(map(add, self._means, forecast.means))
        self._variances = list(map(add, self._variances, forecast.variances))

    def remove(self, forecast: KvForecast) -> None:
        """Removes a forecast that was added."""
        self._peak = self._safe = None
        if not forecast.means:
            self._constant -= forecast.num_tokens
            return
        self._num -= 1
        self._tokens -= forecast.num_tokens
        self._means = list(map(sub, self._means, forecast.means))
        self._variances = list(map(sub, self._variances, forecast.variances))

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
        if not self._num:
            return self._constant
        return self._constant + math.ceil(
            max(
                # Not more than if all go on.
                min(mean + margin * math.sqrt(variance), self._tokens + self._num * middle)
                for mean, variance, middle in zip(
                    self._means, self._variances, _MIDDLES, strict=True
                )
            )
        )
