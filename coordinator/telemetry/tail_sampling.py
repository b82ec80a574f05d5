"""Which requests are traced though their callers did not ask: decided when they are over.

All that failed, all that were slower than nearly every other lately, and a share of the rest. Pure.
"""

from __future__ import annotations

import zlib

from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import EndedRequest
from baton.coordinator.telemetry.recent import Recent

_SLOW_PERCENT = 99.0
# Of fewer requests there is no such percentile.
_LEAST_SEEN = 100
# More than what sketches round by: equal requests are not slower than each other.
_CLEARLY = 1.05
# The percentiles are looked up once in so long.
_HOLDS_S = 5.0


class TailSampler:
    """Decides for one request after the other.

    Args:
        share: of requests that neither failed nor were slow, 0 to 1; None: no request is kept.
        recent: what the latest requests were like.
    """

    def __init__(self, share: float | None, recent: Recent) -> None:
        self._share, self._recent = share, recent
        # By lane: TTFT and whole requests, in seconds; infinite while too few are known.
        self._slow_s: dict[Lane, tuple[float, float]] = {}
        self._until = float("-inf")

    def reason(self, record: EndedRequest, now: float) -> str:
        """Why it is kept: "error", "slow" or "share"; empty when it is not."""
        if self._share is None:
            return ""
        if record.error_code:
            return "error"
        ttft_s, e2e_s = self._thresholds(record.lane, now)
        budget = record.budget
        if budget.ttft_us / 1e6 > ttft_s or budget.total_us / 1e6 > e2e_s:
            return "slow"
        # The same request in every process, and by no clock or chance.
        drawn = zlib.crc32(record.request_id.encode()) / 2**32
        return "share" if drawn < self._share else ""

    def _thresholds(self, lane: Lane, now: float) -> tuple[float, float]:
        if now >= self._until:
            self._slow_s.clear()
            self._until = now + _HOLDS_S
        found = self._slow_s.get(lane)
        if found is None:
            window = self._recent.window(now).lanes[lane]
            ttft_s, e2e_s = (
                _CLEARLY * sketch.percentiles_s([_SLOW_PERCENT])[0]
                if sketch.num >= _LEAST_SEEN
                else float("inf")
                for sketch in (window.ttft, window.e2e)
            )
            found = self._slow_s[lane] = ttft_s, e2e_s
        return found
