"""Conversion between seconds and protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def duration(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found


def to_seconds(value: Duration | Timestamp) -> float:
    """Returns the seconds of a duration, or the seconds from 1970 to a timestamp."""
    return value.ToNanoseconds() / 1e9
