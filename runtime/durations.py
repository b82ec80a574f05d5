"""Conversion of seconds to protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    found = Duration()
    found.FromMicroseconds(round(seconds * 1e6))
    return found
