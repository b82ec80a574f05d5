"""Slow engine steps of a worker, and the stalls that they caused in the streams of requests."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from baton.coordinator.state.requests import RequestKey
from baton.v1 import admin_pb2

# Number of slow steps that are remembered per worker. A gap's cause is looked up when its request
# ends.
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
        at: When the step's outputs came, by the core's clock.
        by: Request whose prompt or arrival made the step slow; None: no single request.
        num_tokens: Number of tokens of that request's prompt.
        num_requests: Number of requests with outputs in the step.
    """

    at: float
    cause: Cause
    by: RequestKey | None
    num_tokens: int
    num_requests: int


class Stall(NamedTuple):
    """A gap that exceeded the request's target; times are microseconds since its arrival."""

    start_us: int
    duration_us: int
    cause: Cause
    worker_id: str = ""
    by_request_id: str = ""
    by_tenant: str = ""
    num_tokens: int = 0
    num_requests: int = 0
