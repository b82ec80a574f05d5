"""The prefill role: computes the prompt, reports its first token, hands over the KV cache."""

from __future__ import annotations

from time import monotonic

from baton.engine.base import Engine, EngineOutput, Finish
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.v1 import cluster_pb2
from baton.worker.attempts import Attempt
from baton.worker.sends import Send, Sends


class PrefillRole:
    """Runs attempts that compute a prompt and, with a handoff, send its KV cache.

    Args:
        engine: Started engine.
        sends: Handoffs from this worker.
    """

    def __init__(self, engine: Engine, sends: Sends) -> None:
        self._engine, self._sends = engine, sends

    async def begin(self, attempt: Attempt) -> None:
        """Reserves staging for the handoff and submits the prompt to the engine.

        If the reservation fails, the failed handoff is reported and the prompt is computed anyway.
        If this coroutine is cancelled or fails, the caller must still call `release`.

        Raises:
            RequestRejected: The engine does not accept the request.
            EngineDead: The engine has failed.
        """
        send = None if attempt.handoff is None else await self._reserve(attempt, attempt.handoff)
        attempt.submitted_at = monotonic()
        await self._engine.submit(attempt.engine_request(prefill_only=True, send=send))

    def on_output(self, attempt: Attempt, output: EngineOutput) -> None:
        """Releases the handoff of a request that ends with its first token."""
        if output.finish is not None and output.finish is not Finish.CUT:
            self.release(attempt)

    def release(self, attempt: Attempt) -> None:
        """Ends the handoff. The engine must no longer write its staging."""
        if attempt.handoff is not None:
            self._sends.release(attempt.handoff.handoff_id)

    async def _reserve(self, attempt: Attempt, plan: cluster_pb2.HandoffPlan) -> SendHandoff | None:
        spec = attempt.spec
        self._sends.add(Send(plan, spec.traceparent, spec.request_id, spec.attempt))
        try:
            return await self._sends.reserve(plan)
        except TransferError as error:
            self._sends.fail(plan.handoff_id, error)
            return None
