"""What the two workers of a handoff say of its end."""

from __future__ import annotations

from collections import OrderedDict

from baton.coordinator.core.request_lifecycle import RequestLifecycle
from baton.coordinator.state.requests import RequestKey, WorkerKey
from baton.v1 import cluster_pb2, kv_transfer_pb2

_MAX_REMEMBERED = 4096


class HandoffReports:
    """Both ends report a handoff; each counts once."""

    def __init__(self, lifecycle: RequestLifecycle) -> None:
        self._lifecycle = lifecycle
        # Whether they were committed.
        self._ended: OrderedDict[bytes, bool] = OrderedDict()

    def take(self, worker: WorkerKey, report: cluster_pb2.HandoffReport, now: float) -> None:
        """Applies a report from an attached worker."""
        committed = report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        if not committed and report.state != kv_transfer_pb2.HANDOFF_STATE_FAILED:
            return
        request, stats = (
            self._lifecycle.requests.get(RequestKey(report.request_id)),
            self._lifecycle.stats,
        )
        if request is not None and request.handoff_id == report.handoff_id:
            request.exposed_us = report.exposed_us or request.exposed_us
            if committed:
                self._lifecycle.handed_over(request)
            else:
                self._lifecycle.handoff_failed(request, worker)
        # Only the sending end knows of them, and it need not be the first to report.
        if report.num_fallbacks:
            stats.handoff_fell_back(report.num_fallbacks, now)
        was_committed = self._ended.get(report.handoff_id)
        # What was committed may still fail to be loaded.
        if was_committed is False or (was_committed and committed):
            return
        self._ended[report.handoff_id] = committed
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)
        if committed:
            stats.handoff_committed(report, now)
        elif report.reason != kv_transfer_pb2.REFUSAL_REASON_CANCELLED:
            stats.handoff_failed(report.reason, now)
