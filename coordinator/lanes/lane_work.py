"""Prefill work that waits for workers, and the rate at which it leaves the queue."""

from __future__ import annotations

import math

# Time constant of the averages, in seconds.
_DECAY_S = 10.0
# The averages are updated at most this often, in seconds.
_UPDATE_S = 0.05
# Prior: the rate that prefill workers could reach counts as if it was measured this long.
_PRIOR_S = 0.1
_US = 1e6


class WaitingWork:
    """The prefill work that waits in a lane's queue, and the rate at which it leaves.

    With n prefill workers, at most n seconds of work leave per second. Less leaves if another
    resource is short: KV blocks of decode workers, or requests that a lane may run. The actual
    rate is measured while work waits.
    """

    __slots__ = ("_lasted_s", "_left_s", "_updated_at", "_work_us")

    def __init__(self) -> None:
        # Integer microseconds: a sum of floats would drift.
        self._work_us = 0
        # Recent seconds in which work waited, and seconds of work that left in them. Both decay.
        self._lasted_s = self._left_s = 0.0
        self._updated_at = 0.0

    @property
    def work_s(self) -> float:
        """Seconds of prefill work that wait."""
        return self._work_us / _US

    def add(self, work_us: int, now: float) -> None:
        """Adds microseconds of work."""
        if not self._work_us or now > self._updated_at + _UPDATE_S:
            self._update(now)
        self._work_us += work_us

    def remove(self, work_us: int, now: float, *, left: bool) -> None:
        """Removes microseconds of work.

        Args:
            work_us: How many.
            now: Current time by the core's clock.
            left: Whether it went to workers after a wait, so that it counts for the rate.
        """
        if self._work_us == work_us or now > self._updated_at + _UPDATE_S:
            self._update(now)
        self._work_us -= work_us
        if left:
            self._left_s += work_us / _US

    def per_s(self, most_per_s: float, now: float) -> float:
        """Returns how many seconds of work leave per second.

        Args:
            most_per_s: Seconds of work that the prefill workers can compute per second.
            now: Current time by the core's clock.
        """
        self._update(now)
        measured = (self._left_s + most_per_s * _PRIOR_S) / (self._lasted_s + _PRIOR_S)
        return min(most_per_s, measured)

    def _update(self, now: float) -> None:
        """Decays the averages by the time since the last update."""
        elapsed_s = now - self._updated_at
        if elapsed_s > 0:
            self._updated_at = now
            decay = math.exp(-elapsed_s / _DECAY_S)
            self._left_s *= decay
            self._lasted_s *= decay
            if self._work_us:
                self._lasted_s += (1 - decay) * _DECAY_S
