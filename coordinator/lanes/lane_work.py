"""Work that waits for workers, and how fast it has been leaving."""

from __future__ import annotations

import math

# What was seen fades within about so long.
_FADES_S = 10.0
# It need not fade more often than this.
_GRAIN_S = 0.05
# What is expected without it counts as so much that was seen.
_EXPECTED_S = 0.1
_US = 1e6


class WaitingWork:
    """Seconds of prefill work that wait in a track.

    Prefill workers take so many seconds of it in each second. Where something else is short (KV
    room of decode workers, requests that a lane may have running) less leaves, and how much less is
    seen while there is something to leave.
    """

    __slots__ = ("_at", "_lasted_s", "_left_s", "_work_us")

    def __init__(self) -> None:
        # Whole ones: sums of floats would drift.
        self._work_us = 0
        # While there was some: how long that was, and what left; both fade.
        self._lasted_s = self._left_s = 0.0
        self._at = 0.0

    @property
    def work_s(self) -> float:
        return self._work_us / _US

    def add(self, work_us: int, now: float) -> None:
        """Adds microseconds of it."""
        if not self._work_us or now > self._at + _GRAIN_S:
            self._pass(now)
        self._work_us += work_us

    def remove(self, work_us: int, now: float, *, left: bool) -> None:
        """Takes some out: it has left after a wait, or was only set apart."""
        if self._work_us == work_us or now > self._at + _GRAIN_S:
            self._pass(now)
        self._work_us -= work_us
        if left:
            self._left_s += work_us / _US

    def per_s(self, most_per_s: float, now: float) -> float:
        """Seconds of work that leave in a second.

        Args:
            most_per_s: as many as prefill workers take.
            now: by the core's clock.
        """
        self._pass(now)
        seen = (self._left_s + most_per_s * _EXPECTED_S) / (self._lasted_s + _EXPECTED_S)
        return min(most_per_s, seen)

    def _pass(self, now: float) -> None:
        """Time has passed."""
        passed_s = now - self._at
        if passed_s > 0:
            self._at = now
            keeps = math.exp(-passed_s / _FADES_S)
            self._left_s *= keeps
            self._lasted_s *= keeps
            if self._work_us:
                self._lasted_s += (1 - keeps) * _FADES_S
