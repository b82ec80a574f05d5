"""The decode role: receives the KV cache or computes the prompt, then generates the output."""

from __future__ import annotations

from time import monotonic

from baton.engine.base import Engine, EngineOutput
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.runtime.durations import to_seconds
from baton.worker.attempts import Attempt
from baton.worker.receives import Receives


class DecodeRole:
    """Runs attempts that receive their KV cache by handoff, or compute their own prompt.

    Args:
        engine: Started engine.
        receives: Handoffs to this worker.
    """

    def __init__(self, engine: Engine, receives: Receives) -> None:
        self._engine, self._receives = engine, receives

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
        self._receives.expect(plan.handoff_id, attempt)
        timeout_s = to_seconds(plan.commit_timeout)
        return ReceiveHandoff(plan.handoff_id, plan.num_tokens, timeout_s, plan.skip_tokens)

    def on_output(self, attempt: Attempt, output: EngineOutput) -> None:
        """Releases the handoff once the engine has run the request or ended it."""
        if not output.has_begun or (plan := attempt.handoff) is None:
            return
        if self._receives.expects(plan.handoff_id, attempt):
            self._receives.release(plan.handoff_id, is_loaded=output.num_handoff_tokens > 0)

    def release(self, attempt: Attempt) -> None:
        """Drops the attempt's handoff, even if it arrives later."""
        if attempt.handoff is not None:
            self._receives.release(attempt.handoff.handoff_id)
