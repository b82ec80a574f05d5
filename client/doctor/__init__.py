"""What is slow in a cell, which stage, the evidence, and what to change first.

A pure function of one status: what it says rests on the last minute and on nothing else.
"""

from __future__ import annotations

from baton.client.doctor.cell import gaps, handoffs, pools, recoveries
from baton.client.doctor.findings import Finding, Kind, lane_of, ms, stage_name
from baton.client.doctor.first_tokens import first_tokens
from baton.v1 import admin_pb2

__all__ = ["Finding", "Kind", "diagnose", "stage_name", "summary"]


def diagnose(status: admin_pb2.GetStatusResponse) -> list[Finding]:
    """Everything that is wrong, the worst first; nothing of a healthy cell."""
    found = [*pools(status), *handoffs(status), *recoveries(status)]
    for lane in status.lanes:
        late = [*first_tokens(status, lane)]
        found += late
        found += (
            one
            for one in gaps(status, lane)
            # It shows in both; once is enough.
            if one.kind is not Kind.NETWORK or all(other.kind is not one.kind for other in late)
        )
    return sorted(found, key=lambda one: -one.weight)


def summary(status: admin_pb2.GetStatusResponse) -> str:
    """One line about a cell without findings."""
    lanes = [lane for lane in status.lanes if lane.ttft.num]
    window_s = status.window.ToNanoseconds() / 1e9
    if not lanes:
        return f"healthy; no request had a first token in the last {window_s:.0f} s"
    told = [
        f"{lane_of(lane)}: {lane.ttft.num} request{'s' * (lane.ttft.num > 1)}, "
        f"TTFT p95 {ms(lane.ttft.p95_us)}, ITL p95 {ms(lane.itl.p95_us)}"
        for lane in lanes
    ]
    return f"healthy; in the last {window_s:.0f} s {'; '.join(told)}"
