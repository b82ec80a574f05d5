"""Slow engine steps of a worker, and the stalls that they caused in the streams of requests."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.coordinator.state.requests import RequestKey
from baton.v1 import admin_pb2

# A worker's slow steps that are remembered: a gap is looked up when its request ends.
MAX_SLOW_STEPS = 64


class Cause(Enum):
    """admin.proto's StallCause; the values are its numbers."""

    PREFILL = admin_pb2.STALL_CAUSE_PREFILL
    JOINED = admin_pb2.STALL_CAUSE_JOINED
    BATCH = admin_pb2.STALL_CAUSE_BATCH
    RECOVERY = admin_pb2.STALL_CAUSE_RECOVERY
    PARKED = admin_pb2.STALL_CAUSE_PARKED
    HANDOFF = admin_pb2.STALL_CAUSE_HANDOFF
    CLIENT = admin_pb2.STALL_CAUSE_CLIENT
    UNKNOWN = admin_pb2.STALL_CAUSE_UNKNOWN


class SlowStep(NamedTuple):
    """An engine step that came later than its lane's inter-token latency target.

    Attributes:
        at: when its outputs came, by the core's clock.
        by: whose prompt or arrival it was; None for none in particular.
        num_tokens: of that prompt.
        num_requests: that had outputs in it.
    """

    at: float
    cause: Cause
    by: RequestKey | None
    num_tokens: int
    num_requests: int


class Stall(NamedTuple):
    """A gap over the request's target; times in microseconds since its arrival."""

    start_us: int
    duration_us: int
    cause: Cause
    worker_id: str = ""
    by_request_id: str = ""
    by_tenant: str = ""
    num_tokens: int = 0
    num_requests: int = 0
