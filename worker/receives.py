"""Tracks the handoffs and the fetched prefixes that this worker receives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from baton.kvtransfer.transfer_client import TransferClient
from baton.v1 import cluster_pb2, kv_transfer_pb2
from baton.worker.attempts import Attempt

_COMMITTED = (kv_transfer_pb2.HANDOFF_STATE_COMMITTED, kv_transfer_pb2.HANDOFF_STATE_CLAIMED)
_ENDED = (kv_transfer_pb2.HANDOFF_STATE_RELEASED, kv_transfer_pb2.HANDOFF_STATE_FAILED)


@dataclass(slots=True)
class _Receive:
    """Times of a handoff by time.monotonic(): when this worker first knew of it, and its commit."""

    begun_at: float = field(default_factory=monotonic)
    committed_at: float | None = None

    def on_state(self, state: kv_transfer_pb2.HandoffState.ValueType) -> None:
        """Records a state change; only a newer epoch invalidates a commit."""
        if state not in _COMMITTED:
            self.committed_at = None
        elif self.committed_at is None:
            self.committed_at = monotonic()

    def add_times(self, report: cluster_pb2.HandoffReport) -> None:
        """Fills in the durations of a handoff that has just ended."""
        now = monotonic()
        received_at = now if self.committed_at is None else self.committed_at
        report.receive_us = round((received_at - self.begun_at) * 1e6)
        report.load_us = round((now - received_at) * 1e6)
        report.total_us = round((now - self.begun_at) * 1e6)


class Receives:
    """Owns the handoffs to this worker, for attempts of both roles.

    Args:
        transfer: Client of the worker's transfer service.
        report: Called with the trace and the result of each handoff that an attempt expects.
        on_change: Called when `num_live` has decreased.
    """

    def __init__(
        self,
        transfer: TransferClient,
        *,
        report: Callable[[str, cluster_pb2.HandoffReport], None],
        on_change: Callable[[], None],
    ) -> None:
        self._transfer, self._report, self._on_change = transfer, report, on_change
        # Handoffs in the transfer service, with or without an attempt on this worker.
        self._receives: dict[bytes, _Receive] = {}
        # Attempts on this worker whose handoff has not ended, by handoff ID.
        self._attempts: dict[bytes, Attempt] = {}

    @property
    def num_live(self) -> int:
        """Number of handoffs to this worker that hold staging or wait for it."""
        return len(self._receives)

    def expect(self, handoff_id: bytes, attempt: Attempt) -> None:
        """Remembers the attempt of a handoff, so that the end of the handoff is reported."""
        self._attempts[handoff_id] = attempt

    def expects(self, handoff_id: bytes, attempt: Attempt) -> bool:
        """Whether the attempt's handoff has not ended, as far as known, and was not released."""
        return self._attempts.get(handoff_id) is attempt

    def release(self, handoff_id: bytes, *, is_loaded: bool = False) -> None:
        """Drops a handoff that its attempt needs no longer, even if the handoff arrives later.

        Args:
            handoff_id: The handoff.
            is_loaded: Whether the engine has loaded the handoff. Its end is reported then, even if
                the engine was faster than the first message about the handoff to this process.
        """
        self.drop(handoff_id)
        if not is_loaded and handoff_id not in self._receives:
            self._attempts.pop(handoff_id, None)

    def drop(self, handoff_id: bytes) -> None:
        """Drops a handoff, even before it is opened or its request has come."""
        self._transfer.drop(handoff_id)

    def keep_only(self, handoff_ids: set[bytes]) -> None:
        """Drops all handoffs except these."""
        for handoff_id in self._receives.keys() - handoff_ids:
            self._transfer.drop(handoff_id)

    def on_handoff_state(self, state: kv_transfer_pb2.LocalHandoffState) -> None:
        """Handles a state change of a handoff to this worker, from the transfer service."""
        if state.state not in _ENDED:
            self._receives.setdefault(state.handoff_id, _Receive()).on_state(state.state)
            return
        # `receive` is None if the handoff ended before this process knew of it.
        receive = self._receives.pop(state.handoff_id, None)
        attempt = self._attempts.pop(state.handoff_id, None)
        if attempt is not None:
            report = attempt.handoff_report(state.handoff_id)
            report.epoch, report.state = state.epoch, state.state
            report.reason, report.detail = state.reason, state.detail
            report.num_bytes, report.transport = state.num_bytes, state.transport
            if receive is not None:
                receive.add_times(report)
            self._report(attempt.spec.traceparent, report)
        self._on_change()
