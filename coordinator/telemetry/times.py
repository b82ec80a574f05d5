"""Conversions between seconds and protobuf times."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from baton.runtime.durations import to_seconds
from baton.runtime.errors import InvalidArgument

LONGEST_S = 3.2e7
"""About a year; timers reject longer delays."""


def timestamp(seconds: float) -> Timestamp:
    """Converts seconds since the epoch."""
    found = Timestamp()
    found.FromMicroseconds(round(seconds * 1e6))
    return found


def drain_s(field: str, asked: Duration) -> float:
    """Seconds that requests get to finish during a drain; raises InvalidArgument."""
    seconds = to_seconds(asked)
    if not 0 < seconds <= LONGEST_S:
        allowed = f"more than 0 and at most {LONGEST_S:.0f} s"
        raise InvalidArgument(field, f"{seconds:g} s", allowed)
    return seconds
