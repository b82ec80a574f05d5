"""Label values of handoff metrics, shared by the coordinator and the workers.

Text from other processes becomes a label only through these functions, which bounds the number of
label values.
"""

from __future__ import annotations

from baton.runtime.kv.kv_transports import TRANSPORTS
from baton.v1 import kv_transfer_pb2

# Histogram bounds in seconds; a handoff over shared memory commits in under a millisecond.
EXPOSED_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


def transport_label(name: str) -> str:
    """Name of a transport; "none" for a handoff that ended before a transport was agreed."""
    if not name:
        return "none"
    return name if name in TRANSPORTS else "other"


def reason_label(reason: kv_transfer_pb2.RefusalReason.ValueType) -> str:
    """Name of a refusal's reason, such as "no_room"; "other" for one of a newer protocol."""
    known = kv_transfer_pb2.RefusalReason.DESCRIPTOR.values_by_number.get(reason)
    return known.name.removeprefix("REFUSAL_REASON_").lower() if known is not None else "other"


def outcome_label(
    state: kv_transfer_pb2.HandoffState.ValueType,
    reason: kv_transfer_pb2.RefusalReason.ValueType,
) -> str:
    """Outcome of a handoff: "committed", "released", "failed", or "cancelled" on request."""
    if reason == kv_transfer_pb2.REFUSAL_REASON_CANCELLED:
        return "cancelled"
    known = kv_transfer_pb2.HandoffState.DESCRIPTOR.values_by_number.get(state)
    return known.name.removeprefix("HANDOFF_STATE_").lower() if known is not None else "other"
