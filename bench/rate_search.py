"""The highest rate of arrivals at which a system still does well enough."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# From one rate to the next while every one tried was kept up with, or none was.
GROWTH = 1.5
# The rate is known well enough when what lies above it is so many times what lies below, or less.
RESOLUTION = 1.06


@dataclass(slots=True)
class RateSearch:
    """Steps upwards until a rate is too high, then bisects the logarithm.

    Attributes:
        kept_share: of the requests that must have met the SLO for a rate to count as kept.
        first_rate: requests/s; where it begins.
        tried: share of requests that met the SLO, by rate.
    """

    kept_share: float
    first_rate: float
    tried: dict[float, float] = field(default_factory=dict)
    _low: float = 0.0
    _high: float = math.inf

    @property
    def low(self) -> float:
        """The highest rate that was kept, below every one that was not; 0: none was."""
        return self._low

    @property
    def rate(self) -> float:
        """Where the share is crossed, as far as it is known; 0: nowhere that was tried."""
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
        """Takes in what a run at `next_rate` gave."""
        self.tried[rate] = share
        if share >= self.kept_share:
            self._low = rate
        else:
            self._high = rate
