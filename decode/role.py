"""What a worker does in the decode role: take the baton, or compute the prompt, and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from baton.engine.attempts import Attempt
from baton.engine.base import Engine, EngineOutput, ReceiveHandoff
from baton.kvtransfer.control import TransferClient
from baton.v1 import cluster_pb2, kv_transfer_pb2

_COMMITTED = (kv_transfer_pb2.HANDOFF_STATE_COMMITTED, kv_transfer_pb2.HANDOFF_STATE_CLAIMED)
_ENDED = (kv_transfer_pb2.HANDOFF_STATE_RELEASED, kv_transfer_pb2.HANDOFF_STATE_FAILED)


@dataclass(slots=True)
class _Receive:
    """When (monotonic) this worker heard of it, and of its commit."""

    begun_at: float = field(default_factory=monotonic)
    committed_at: float | None = None

    def heard(self, state: kv_transfer_pb2.HandoffState.ValueType) -> None:
        """Only a newer epoch takes a commit back."""
        if state not in _COMMITTED:
            self.committed_at = None
        elif self.committed_at is None:
            self.committed_at = monotonic()

    def add_times(self, report: cluster_pb2.HandoffReport) -> None:
        """Now that it has ended."""
        now = monotonic()
        received_at = now if self.committed_at is None else self.committed_at
        report.receive_us = round((received_at - self.begun_at) * 1e6)
        report.load_us = round((now - received_at) * 1e6)
        report.total_us = round((now - self.begun_at) * 1e6)


class DecodeRole:
    """Knows the handoffs on their way to this worker.

    Args:
        engine: started.
        transfer: the worker's transfer service.
        report: takes how each handoff of a request here ended.
        on_change: called when `num_receives` has gone down.
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
        # Alive in the transfer service, whether or not their request is here already.
        self._receives: dict[bytes, _Receive] = {}
        # Of requests here whose handoff has not ended.
        self._attempts: dict[bytes, Attempt] = {}

    @property
    def num_receives(self) -> int:
        """Handoffs to this worker that hold staging, or wait for some."""
        return len(self._receives)

    async def expect(self, attempt: Attempt, num_coming_tokens: int) -> None:
        """Lets the engine load what comes of a handoff before its first token is known.

        Raises:
            EngineDead.
        """
        receive = self._receive(attempt)
        request = attempt.engine_request(receive=receive)
        await self._engine.announce(request, num_coming_tokens)

    async def begin(self, attempt: Attempt) -> None:
        """Gives the request to the engine, which waits for the commit.

        Raises:
            RequestRejected, EngineDead.
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
        """Once the engine has run the request its handoff is loaded or never will be."""
        begun = output.queue_s is not None or output.finish is not None
        if begun and attempt.handoff is not None and attempt.handoff.handoff_id in self._attempts:
            self.release(attempt)

    def release(self, attempt: Attempt) -> None:
        """The handoff is not wanted (any more), also when it only comes later."""
        if attempt.handoff is None:
            return
        self._transfer.drop(attempt.handoff.handoff_id)
        if attempt.handoff.handoff_id not in self._receives:
            self._attempts.pop(attempt.handoff.handoff_id, None)

    def drop(self, handoff_id: bytes) -> None:
        """Forgets a handoff, also before it was opened or its request came."""
        self._transfer.drop(handoff_id)

    def keep_only(self, handoff_ids: set[bytes]) -> None:
        """Drops the handoffs that no longer belong to anybody."""
        for handoff_id in self._receives.keys() - handoff_ids:
            self._transfer.drop(handoff_id)

    def on_handoff_state(self, state: kv_transfer_pb2.LocalHandoffState) -> None:
        """What became of a handoff to this worker, from the transfer service."""
        if state.state not in _ENDED:
            self._receives.setdefault(state.handoff_id, _Receive()).heard(state.state)
            return
        # None: it ended before it was heard of.
        receive = self._receives.pop(state.handoff_id, None)
        attempt = self._attempts.pop(state.handoff_id, None)
        if attempt is not None:
            report = attempt.handoff_report()
            report.epoch, report.state = state.epoch, state.state
            report.reason, report.detail = state.reason, state.detail
            report.num_bytes, report.transport = state.num_bytes, state.transport
            if receive is not None:
                receive.add_times(report)
            self._report(attempt, report)
        self._on_change()
