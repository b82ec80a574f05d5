"""Estimates from recent prompts of an elastic cell how fast workers must compute prompts."""

from __future__ import annotations

import math

from baton.coordinator.telemetry.recent_values import RecentValues

# Number of latest prompts that are kept, and the smallest number that gives an estimate.
_WINDOW, _LEAST = 256, 32
# Mean age of the work that counts for the rate, in seconds.
_RATE_S = 30.0
# After a pause of this many times _RATE_S, the rate begins anew: older work has less than 1 % of
# its weight.
_PAUSE = 5
# This quantile of the prompts must be computed within this share of their TTFT target. The rest of
# the target is for the queue. With a share of 0.5, two simulated workers near capacity served one
# percentage point fewer requests in time.
_QUANTILE, _TARGET_SHARE = 0.95, 0.3
# Share of the time for which prompts may keep the workers busy; above it, queues are too long.
_BUSY_SHARE = 1 / 3
# Late prompts may have time too if recent prompts take less than this share of it.
_LEFT_SHARE = 0.15


class PromptDemand:
    """The sizes of recent interactive prompts, and the rate of their work."""

    def __init__(self) -> None:
        # Seconds of computation as a share of the TTFT target.
        self._shares = RecentValues[float](_WINDOW)
        self._sum, self._at = 0.0, -math.inf
        self._began_at = math.inf
        self._late_at = -math.inf

    def was_late(self, now: float) -> None:
        """Records that a prompt could not be in time on any worker.

        The prompts that are placed meanwhile are the shortest ones, and say nothing of the others.
        """
        self._late_at = now

    def add(self, work_s: float, target_s: float, now: float) -> None:
        """Records a prompt.

        Args:
            work_s: seconds that a worker without other work computes it.
            target_s: TTFT target of its request in seconds; infinite: it has none.
            now: time by the core's clock.
        """
        self._shares.add(work_s / target_s)
        if now - self._at > _PAUSE * _RATE_S:
            self._began_at, self._sum = now, 0.0
        self._sum = self._decayed(now) + work_s / _RATE_S
        self._at = now

    def needed_speed(self, num_workers: int, now: float) -> float:
        """Share of the full speed at which each worker must compute such prompts.

        Infinite before enough prompts have come, if prompts have no TTFT target, and for a while
        after a late prompt.

        Args:
            num_workers: number of workers that share the prompts.
            now: time by the core's clock.
        """
        if len(self._shares) < _LEAST or not self._shares.ordered[-1]:
            return math.inf
        if now < self._late_at + _RATE_S:
            return math.inf
        of_target = self._shares.quantile(_QUANTILE) / _TARGET_SHARE
        return max(of_target, self._rate_at(now) / (_BUSY_SHARE * num_workers))

    def leaves_time(self, speed: float, now: float) -> bool:
        """Whether recent prompts leave so much of the workers' time that late ones may have some.

        Args:
            speed: speed of all workers together at which they compute prompts now.
            now: time by the core's clock.
        """
        return self._rate_at(now) < _LEFT_SHARE * speed

    def _rate_at(self, now: float) -> float:
        """Seconds of prompt work per second.

        At first, and after a pause, the weights of the time since then do not add up to 1, so the
        sum is divided by theirs.
        """
        weights = -math.expm1((self._began_at - now) / _RATE_S)
        return self._decayed(now) / weights if weights > 0 else math.inf

    def _decayed(self, now: float) -> float:
        """Sum of the prompts' work, each with a weight that falls with its age."""
        return self._sum * math.exp((self._at - now) / _RATE_S)
