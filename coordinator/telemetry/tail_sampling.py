"""Tail sampling of traces: decides at a request's end whether its trace is kept.

The sampler keeps the traces of all failed requests, of the slowest requests, and of a share of the
others.
"""

from __future__ import annotations

import zlib

from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import EndedRequest
from baton.coordinator.telemetry.recent import Recent

_SLOW_PERCENT = 99.0
# With fewer requests in the window, no request counts as slow.
_MIN_REQUESTS = 100
# A request is slow if its latency exceeds the percentile by this factor. The factor is larger than
# the error of the sketch, so that requests with equal latencies do not count as slow.
_SLOW_FACTOR = 1.05
# The percentiles are recomputed after this many seconds.
_REFRESH_S = 5.0


class TailSampler:
    """Decides whether to keep the trace of each ended request.

    Args:
        share: Share (0 to 1) of requests to keep that neither failed nor were slow; None: no trace
            is kept at all.
        recent: Recent latencies.
    """

    def __init__(self, share: float | None, recent: Recent) -> None:
        self._share, self._recent = share, recent
        # By lane: thresholds of TTFT and total time in seconds; infinite with too few requests.
        self._slow_s: dict[Lane, tuple[float, float]] = {}
        self._until = float("-inf")

    def reason(self, record: EndedRequest, now: float) -> str:
        """Reason to keep the trace: "error", "slow" or "share"; empty if it is not kept."""
        if self._share is None:
            return ""
        if record.error_code:
            return "error"
        ttft_s, e2e_s = self._thresholds(record.lane, now)
        budget = record.budget
        if budget.ttft_us / 1e6 > ttft_s or budget.total_us / 1e6 > e2e_s:
            return "slow"
        # A hash instead of a random number, so that every process keeps the same requests.
        hashed = zlib.crc32(record.request_id.encode()) / 2**32
        return "share" if hashed < self._share else ""

    def _thresholds(self, lane: Lane, now: float) -> tuple[float, float]:
        if now >= self._until:
            self._slow_s.clear()
            self._until = now + _REFRESH_S
        found = self._slow_s.get(lane)
        if found is None:
            window = self._recent.window(now).lanes[lane]
            ttft_s, e2e_s = (
                _SLOW_FACTOR * sketch.percentiles_s([_SLOW_PERCENT])[0]
                if sketch.num >= _MIN_REQUESTS
                else float("inf")
                for sketch in (window.ttft, window.e2e)
            )
            found = self._slow_s[lane] = ttft_s, e2e_s
        return found
