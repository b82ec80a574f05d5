"""Applies the reports in which the two workers of a handoff tell how it ended."""

from __future__ import annotations

from collections import OrderedDict

from baton.coordinator.core.assignments import Assignments
from baton.coordinator.core.attempts import Attempts
from baton.coordinator.core.fetches import Fetches
from baton.coordinator.core.parts import Parts
from baton.coordinator.state.requests import Request, RequestKey, WorkerKey
from baton.v1 import cluster_pb2, kv_transfer_pb2

# Number of ended handoffs that are remembered, to recognize the second report.
_MAX_REMEMBERED = 4096


class HandoffReports:
    """Applies and counts handoff reports; both workers report a handoff, and it counts once."""

    def __init__(
        self, parts: Parts, attempts: Attempts, assignments: Assignments, fetches: Fetches
    ) -> None:
        self._requests, self._stats, self._clock = parts.requests, parts.stats, parts.clock
        self._placers = parts.placers
        self._attempts, self._assignments, self._fetches = attempts, assignments, fetches
        # Whether each ended handoff was committed.
        self._ended: OrderedDict[bytes, bool] = OrderedDict()

    def take(self, worker: WorkerKey, report: cluster_pb2.HandoffReport) -> None:
        """Applies a report from an attached worker."""
        now = self._clock.now
        if self._fetches.reported(worker, report):
            return
        committed = report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        if not committed and report.state != kv_transfer_pb2.HANDOFF_STATE_FAILED:
            return
        request, stats = self._requests.get(RequestKey(report.request_id)), self._stats
        if request is not None and request.handoff_id == report.handoff_id:
            request.exposed_us = report.exposed_us or request.exposed_us
            if committed:
                self._assignments.end_handoff(request)
                self._measure_network(request, report)
            else:
                self._attempts.handoff_failed(request, worker)
        # Only the sender reports fallbacks, and its report may come second.
        if report.num_fallbacks:
            stats.handoff_fell_back(report.num_fallbacks, now)
        was_committed = self._ended.get(report.handoff_id)
        # The load of a committed handoff may still fail.
        if was_committed is False or (was_committed and committed):
            return
        self._ended[report.handoff_id] = committed
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if committed:
            stats.handoff_committed(report, now)
        elif report.reason != kv_transfer_pb2.REFUSAL_REASON_CANCELLED:
            stats.handoff_failed(report.reason, now)

    def _measure_network(self, request: Request, report: cluster_pb2.HandoffReport) -> None:
        """Updates the measured network speed with a committed handoff.

        The time of a handoff is only an upper limit of the network's time, because its bytes also
        waited for their computation.
        """
        if request.prefill is None or request.decode is None:
            return
        view, pair = self._placers.of(request.fleet).view, (request.prefill, request.decode)
        seconds = (report.fill_us + report.exposed_us) / 1e6
        view.transfers.observe_at_most(pair, report.num_bytes, seconds, near=view.near(*pair))
