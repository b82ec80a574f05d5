"""The ends of received handoffs that are reported to the coordinator."""

from __future__ import annotations

import pytest

from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from baton.worker.attempts import Attempt
from baton.worker.receives import Receives

RELEASED = kv_transfer_pb2.HANDOFF_STATE_RELEASED


class Transfer:
    """Records what is dropped in the transfer service."""

    def __init__(self) -> None:
        self.dropped: list[bytes] = []

    def drop(self, handoff_id: bytes) -> None:
        self.dropped.append(handoff_id)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_end_of_a_loaded_fetch_is_reported_also_if_it_is_the_first_message(is_loaded):
    """The engine may begin the request before this process has heard of the handoff."""
    transfer, reports = Transfer(), []
    receives = Receives(
        transfer,
        report=lambda trace, report: reports.append((trace, report.state)),
        on_change=lambda: None,
    )
    fetch = cluster_pb2.FetchPlan(handoff_id=b"h", num_tokens=32)
    attempt = Attempt(
        cluster_pb2.RequestSpec(request_id="r", traceparent="t"),
        common_pb2.ROLE_DECODE,
        None,
        fetch,
    )
    receives.expect(b"h", attempt)
    receives.release(b"h", is_loaded=is_loaded)
    assert transfer.dropped == [b"h"]
    receives.on_handoff_state(kv_transfer_pb2.LocalHandoffState(handoff_id=b"h", state=RELEASED))
    assert reports == ([("t", RELEASED)] if is_loaded else [])
