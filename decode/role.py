"""The decode role: receives the KV cache or computes the prompt, then generates the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from baton.engine.attempts import Attempt
from baton.engine.base import Engine, EngineOutput
from baton.kvtransfer.control import TransferClient
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.v1 import cluster_pb2, kv_transfer_pb2

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


class DecodeRole:
    """Tracks the handoffs to this worker.

    Args:
        engine: Started engine.
        transfer: Client of the worker's transfer service.
        report: Called with the result of each handoff of this worker's requests.
        on_change: Called when `num_receives` has decreased.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: TransferClient,
        *,
        report: Callable[[Attempt, cluster_pb2.HandoffReport], None],
        on_change: Callable[[], None],
    ) -> None:
        self._engine, self._transfer = engine, transfer
        self._report, self._on_change = report, on_change
        # Handoffs in the transfer service, with or without a request on this worker.
        self._receives: dict[bytes, _Receive] = {}
        # Requests on this worker whose handoff has not ended, by handoff ID.
        self._attempts: dict[bytes, Attempt] = {}

    @property
    def num_receives(self) -> int:
        """Handoffs to this worker that hold staging or wait for it."""
        return len(self._receives)

    async def begin(self, attempt: Attempt) -> None:
        """Submits the request to the engine, which waits for the handoff's commit.

        Raises:
            RequestRejected: The engine does not accept the request.
            EngineDead: The engine has failed.
        """
        receive = self._receive(attempt)
        attempt.submitted_at = monotonic()
        await self._engine.submit(attempt.engine_request(receive=receive))

    def _receive(self, attempt: Attempt) -> ReceiveHandoff | None:
        if (plan := attempt.handoff) is None:
            return None
        self._attempts[plan.handoff_id] = attempt
        timeout_s = plan.commit_timeout.ToNanoseconds() / 1e9
        return ReceiveHandoff(plan.handoff_id, plan.num_tokens, timeout_s, plan.skip_tokens)

    def on_output(self, attempt: Attempt, output: EngineOutput) -> None:
        """Releases the handoff once the engine has run the request or ended it."""
        begun = output.timings is not None or output.finish is not None
        if begun and attempt.handoff is not None and attempt.handoff.handoff_id in self._attempts:
            self.release(attempt, is_loaded=output.num_handoff_tokens > 0)

    def release(self, attempt: Attempt, *, is_loaded: bool = False) -> None:
        """Drops the handoff, even if it arrives later.

        Args:
            attempt: The attempt.
            is_loaded: Whether the engine has loaded the handoff. Its end is reported then, even if
                the engine was faster than the first message about the handoff to this process.
        """
        if attempt.handoff is None:
            return
        self._transfer.drop(attempt.handoff.handoff_id)
        if not is_loaded and attempt.handoff.handoff_id not in self._receives:
            self._attempts.pop(attempt.handoff.handoff_id, None)

    def expect_fetch(self, attempt: Attempt) -> None:
        """Remembers an attempt of any role, so that the end of its fetch, if any, is reported."""
        if attempt.fetch is not None and attempt.fetch.num_tokens:
            self._attempts[attempt.fetch.handoff_id] = attempt

    def release_fetch(self, attempt: Attempt, *, is_loaded: bool = False) -> None:
        """Drops the prefix that an attempt fetches, even if it arrives later. Idempotent.

        Arguments as in `release`.
        """
        if attempt.fetch is None or self._attempts.get(attempt.fetch.handoff_id) is not attempt:
            return
        self._transfer.drop(attempt.fetch.handoff_id)
        if not is_loaded and attempt.fetch.handoff_id not in self._receives:
            del self._attempts[attempt.fetch.handoff_id]

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
            self._report(attempt, report)
        self._on_change()
