"""Counts the handoffs of this worker's requests, and records them as spans."""

from __future__ import annotations

import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.runtime.kv.handoff_metrics import EXPOSED_S, outcome_label, reason_label, transport_label
from baton.runtime.names import request_name_parts
from baton.runtime.telemetry.histogram import Histogram
from baton.runtime.telemetry.tracing import Span, Tracing
from baton.v1 import cluster_pb2, kv_transfer_pb2

SEND, RECEIVE = "send", "receive"


class HandoffOutcome(NamedTuple):
    """Labels that ended handoffs are counted by."""

    direction: str
    outcome: str
    transport: str


@dataclass(slots=True)
class HandoffCounts:
    """Handoff counts since the worker started.

    Attributes:
        num_ended: Ended handoffs by direction, outcome and transport.
        exposed: Exposed time of committed handoffs in seconds, by transport.
    """

    num_ended: Counter[HandoffOutcome] = field(default_factory=Counter)
    exposed: dict[str, Histogram] = field(default_factory=dict)


class HandoffLog:
    """Receives the result of every handoff of this worker's requests.

    Args:
        tracing: Exporter of the spans.
    """

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._counts = HandoffCounts()

    def record(self, direction: str, traceparent: str, report: cluster_pb2.HandoffReport) -> None:
        """Records a handoff that has just ended.

        Args:
            direction: SEND or RECEIVE.
            traceparent: Trace of its request; empty: none.
            report: Its result.
        """
        transport = transport_label(report.transport)
        outcome = outcome_label(report.state, report.reason)
        self._counts.num_ended[HandoffOutcome(direction, outcome, transport)] += 1
        if report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED:
            histogram = self._counts.exposed.setdefault(transport, Histogram(EXPOSED_S))
            histogram.observe(report.exposed_us / 1e6)
        if self._tracing.is_sampled(traceparent):
            make = send_spans if direction == SEND else receive_spans
            self._tracing.record(traceparent, *make(report, time.time_ns()))

    def counts(self) -> HandoffCounts:
        """A copy of the counts, for a reader in another thread."""
        return deepcopy(self._counts)


def send_spans(report: cluster_pb2.HandoffReport, now_ns: int) -> list[Span]:
    """Spans of a handoff that this worker sent and that ended at now_ns.

    The send staging is reserved first. Then the receiver reserves its staging, while the engine
    fills the send staging and frames are sent. The time after the last fill is the commit.
    """
    begun_ns = now_ns - report.total_us * 1000
    committed = report.state == kv_transfer_pb2.HANDOFF_STATE_COMMITTED
    if committed:
        filled_ns = now_ns - report.exposed_us * 1000
        reserved_ns = filled_ns - report.fill_us * 1000
    else:
        reserved_ns = begun_ns + report.reserve_us * 1000
        filled_ns = reserved_ns + report.fill_us * 1000
    reserve_ns, opened_ns = report.reserve_us * 1000, reserved_ns + report.open_us * 1000
    children = [Span("handoff reserve", reserved_ns - reserve_ns, reserved_ns)]
    # A failed handoff may have ended before these stages.
    if committed or report.open_us:
        children.append(Span("handoff open", reserved_ns, opened_ns))
    if committed or report.fill_us:
        children.append(Span("handoff fill", reserved_ns, filled_ns))
    if committed:
        children.append(Span("handoff commit", filled_ns, now_ns))
    return [
        Span(
            "handoff",
            min(begun_ns, children[0].start_ns),
            now_ns,
            _attributes(report)
            | {
                "baton.handoff.fallbacks": report.num_fallbacks,
                "baton.handoff.frames": report.num_frames,
            },
            _error(report),
            children,
        )
    ]


def receive_spans(report: cluster_pb2.HandoffReport, now_ns: int) -> list[Span]:
    """Spans of a handoff to this worker that ended at now_ns; load includes the engine's queue."""
    received_ns = now_ns - report.load_us * 1000
    begun_ns = received_ns - report.receive_us * 1000
    attributes, error = _attributes(report), _error(report)
    if not report.load_us:
        return [Span("handoff receive", begun_ns, received_ns, attributes, error)]
    return [
        Span("handoff receive", begun_ns, received_ns, attributes),
        Span("handoff load", received_ns, now_ns, attributes, error),
    ]


def _attributes(report: cluster_pb2.HandoffReport) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "baton.request.id": request_name_parts(report.request_id)[1],
        "baton.request.attempt": report.attempt,
        "baton.handoff.id": report.handoff_id.hex(),
        "baton.handoff.epoch": report.epoch,
        "baton.handoff.transport": transport_label(report.transport),
        "baton.handoff.bytes": report.num_bytes,
        "baton.handoff.outcome": outcome_label(report.state, report.reason),
    }
    if report.reason:
        attributes["baton.handoff.reason"] = reason_label(report.reason)
    return attributes


def _error(report: cluster_pb2.HandoffReport) -> str:
    if outcome_label(report.state, report.reason) != "failed":
        return ""
    return report.detail or "failed"
