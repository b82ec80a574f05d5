"""Diagnoses a cell: what is slow, in which stage, the evidence, and what to change first.

The diagnosis is a pure function of one status message, which covers the last minute.
"""

from __future__ import annotations

from baton.client.doctor.decode_and_pools import (
    handoff_findings,
    itl_findings,
    pool_findings,
    recovery_findings,
)
from baton.client.doctor.findings import Finding, Kind, lane_of, ms, stage_name
from baton.client.doctor.ttft import ttft_findings
from baton.runtime.counted import counted
from baton.runtime.durations import to_seconds
from baton.v1 import admin_pb2

__all__ = ["Finding", "Kind", "diagnose", "stage_name", "summary"]


def diagnose(status: admin_pb2.GetStatusResponse) -> list[Finding]:
    """Returns all problems of a cell, the worst first; empty for a healthy cell."""
    found = [*pool_findings(status), *handoff_findings(status), *recovery_findings(status)]
    for lane in status.lanes:
        late = [*ttft_findings(status, lane)]
        found += late
        found += (
            one
            for one in itl_findings(status, lane)
            # A network problem delays first and later tokens; report it once.
            if one.kind is not Kind.NETWORK or all(other.kind is not one.kind for other in late)
        )
    return sorted(found, key=lambda one: -one.weight)


def summary(status: admin_pb2.GetStatusResponse) -> str:
    """Summarizes a cell without findings in one line."""
    lanes = [lane for lane in status.lanes if lane.ttft.num or lane.itl.num]
    window_s = to_seconds(status.window)
    if not lanes:
        return f"healthy; no request had a token in the last {window_s:.0f} s"
    parts = [
        f"{lane_of(lane)}: {counted(lane.ttft.num, 'request')}, "
        f"TTFT p95 {ms(lane.ttft.p95_us)}, ITL p95 {ms(lane.itl.p95_us)}"
        for lane in lanes
    ]
    return f"healthy; in the last {window_s:.0f} s {'; '.join(parts)}"
