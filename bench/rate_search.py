"""Searches for the highest arrival rate at which a system still meets an SLO."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Factor from one tried rate to the next, until one rate was kept and one was too high.
GROWTH = 1.5
# The search ends when the lowest rate that was too high is at most this times the highest kept one.
RESOLUTION = 1.06


@dataclass(slots=True)
class RateSearch:
    """Increases the rate until it is too high, then bisects on a logarithmic scale.

    Attributes:
        kept_share: A rate counts as kept if at least this share of the requests met the SLO.
        first_rate: Rate in requests/s with which the search begins.
        tried: Share of requests that met the SLO, by rate.
    """

    kept_share: float
    first_rate: float
    tried: dict[float, float] = field(default_factory=dict)
    _low: float = 0.0
    _high: float = math.inf

    @property
    def low(self) -> float:
        """Highest rate that was kept; 0 if no rate was kept."""
        return self._low

    @property
    def rate(self) -> float:
        """Estimate of the highest rate that can be kept; 0 if no tried rate was kept."""
        return self._low if math.isinf(self._high) else math.sqrt(self._low * self._high)

    @property
    def is_done(self) -> bool:
        return self._high <= self._low * RESOLUTION

    @property
    def next_rate(self) -> float:
        if math.isinf(self._high):
            return self._low * GROWTH or self.first_rate
        return math.sqrt(self._low * self._high) or self._high / GROWTH

    def add(self, rate: float, share: float) -> None:
        """Adds the result of a run at `next_rate`."""
        self.tried[rate] = share
        if share >= self.kept_share:
            self._low = rate
        else:
            self._high = rate
