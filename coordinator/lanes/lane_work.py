"""Work that waits for workers, and how fast it has been leaving."""

from __future__ import annotations

import math

# The rate at which work has been leaving is averaged over about so long.
_FADES_S = 10.0
# The average is brought up to date no more often than this.
_GRAIN_S = 0.05
# What prefill workers could take counts as if it had been seen for so long.
_EXPECTED_S = 0.1
_US = 1e6


class WaitingWork:
    """The prefill work that waits in a track, and the rate at which it leaves.

    As many seconds of work can leave in a second as there are prefill workers. Where something else
    is short (KV room of decode workers, requests that a lane may have running) less leaves; how
    much less is seen while there is work that could.
    """

    __slots__ = ("_at", "_lasted_s", "_left_s", "_work_us")

    def __init__(self) -> None:
        # Whole microseconds: sums of floats would drift.
        self._work_us = 0
        # How long there was work lately, and how much of it left meanwhile; both fade.
        self._lasted_s = self._left_s = 0.0
        self._at = 0.0

    @property
    def work_s(self) -> float:
        """Seconds of prefill work that wait."""
        return self._work_us / _US

    def add(self, work_us: int, now: float) -> None:
        """Adds microseconds of work."""
        if not self._work_us or now > self._at + _GRAIN_S:
            self._pass(now)
        self._work_us += work_us

    def remove(self, work_us: int, now: float, *, left: bool) -> None:
        """Takes microseconds of work out.

        Args:
            work_us: how many.
            now: by the core's clock.
            left: whether it has gone to workers after a wait, which tells how fast work leaves.
        """
        if self._work_us == work_us or now > self._at + _GRAIN_S:
            self._pass(now)
        self._work_us -= work_us
        if left:
            self._left_s += work_us / _US

    def per_s(self, most_per_s: float, now: float) -> float:
        """How many seconds of work leave in a second.

        Args:
            most_per_s: how many prefill workers can take.
            now: by the core's clock.
        """
        self._pass(now)
        seen = (self._left_s + most_per_s * _EXPECTED_S) / (self._lasted_s + _EXPECTED_S)
        return min(most_per_s, seen)

    def _pass(self, now: float) -> None:
        """Brings the averages up to date."""
        passed_s = now - self._at
        if passed_s > 0:
            self._at = now
            keeps = math.exp(-passed_s / _FADES_S)
            self._left_s *= keeps
            self._lasted_s *= keeps
            if self._work_us:
                self._lasted_s += (1 - keeps) * _FADES_S
