"""Latency targets of one request, as the coordinator tells them to workers."""

from __future__ import annotations

import math

from baton.v1 import cluster_pb2


def due_in_s(spec: cluster_pb2.RequestSpec) -> float:
    """Seconds until the first token is due; infinite without a TTFT target."""
    return spec.first_token_due_us / 1e6 if spec.HasField("first_token_due_us") else math.inf


def own_itl_s(spec: cluster_pb2.RequestSpec) -> float | None:
    """ITL target that the client named, in seconds; None: the targets of steps apply."""
    return spec.itl_ms / 1e3 or None
