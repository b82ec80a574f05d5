"""The prefill role: computes the prompt, reports its first token, hands over the KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from baton.engine.base import Engine, EngineOutput, Finish, RequestRejected
from baton.kvtransfer.errors import TransferError, TransferRefused
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.fetches import tokens_to_send
from baton.v1 import cluster_pb2, kv_transfer_pb2
from baton.worker.attempts import Attempt

# Number of ended sends that are remembered. The cancellation of a request comes while it decodes on
# another worker, often long after its send.
_MAX_ENDED = 16_384


@dataclass(frozen=True, slots=True)
class _Send:
    """A handoff that this worker sends: its attempt, and its start by time.monotonic()."""

    attempt: Attempt
    begun_at: float = field(default_factory=monotonic)

    def report(self) -> cluster_pb2.HandoffReport:
        assert self.attempt.handoff is not None
        report = self.attempt.handoff_report(self.attempt.handoff.handoff_id)
        report.total_us = round((monotonic() - self.begun_at) * 1e6)
        return report


class PrefillRole:
    """Owns the sends of this worker, from their reservation until the receiver has verified them.

    On this worker a request ends with its first token, but its send may still go on.

    Args:
        engine: Started engine.
        transfer: Client of the worker's transfer service.
        layout: Layout of the engine's KV cache.
        open_timeout_s: Longest wait for staging, here and at the receiver.
        report: Called with the result of each handoff.
        on_change: Called when `num_sends` has decreased.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: TransferClient,
        layout: KvLayout,
        *,
        open_timeout_s: float,
        report: Callable[[Attempt, cluster_pb2.HandoffReport], None],
        on_change: Callable[[], None],
    ) -> None:
        self._engine, self._transfer, self._layout = engine, transfer, layout
        self._open_timeout_s, self._report, self._on_change = open_timeout_s, report, on_change
        self._sends: dict[bytes, _Send] = {}
        # IDs of sends that are over, oldest first. Nothing more is reported of them.
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_sends(self) -> int:
        """Handoffs that are reserved and not yet committed, failed or aborted."""
        return len(self._sends)

    async def begin(self, attempt: Attempt) -> None:
        """Reserves staging for the handoff and submits the prompt to the engine.

        If the reservation fails, the failed handoff is reported and the prompt is computed anyway,
        unless the attempt only sends a cached prefix. If this coroutine is cancelled or fails, the
        caller must still call `release`.

        Raises:
            RequestRejected: The engine does not accept the request, or the reservation failed for
                an attempt that only sends a cached prefix.
            EngineDead: The engine has failed.
        """
        send = await self._reserve(attempt) if attempt.handoff is not None else None
        attempt.submitted_at = monotonic()
        await self._engine.submit(attempt.engine_request(prefill_only=True, send=send))

    def shorten(self, attempt: Attempt, num_held_tokens: int) -> bool:
        """Shortens an attempt that serves a fetch to the blocks that the engine still holds.

        `begin_again` must be called next; it sends these blocks.

        Args:
            attempt: An attempt that has ended with Finish.PREFIX_GONE.
            num_held_tokens: Prompt tokens, from the first, that the engine holds.

        Returns:
            False if these blocks are not worth sending; nothing has changed then.
        """
        plan, size = attempt.handoff, self._layout.block_size_tokens
        if plan is None or plan.handoff_id not in self._sends:
            return False
        if num_tokens := tokens_to_send(plan, num_held_tokens, size):
            attempt.shorten(num_tokens)
        return num_tokens > 0

    async def begin_again(self, attempt: Attempt) -> None:
        """Reduces the reservation of a shortened attempt, and submits the attempt again.

        Raises:
            RequestRejected: The engine does not accept the request, or the handoff has ended.
            EngineDead: The engine has failed.
        """
        plan = attempt.handoff
        assert plan is not None
        num_sent_tokens = plan.num_tokens - plan.skip_tokens
        try:
            offset = await self._transfer.shrink_send(
                plan.handoff_id, self._layout.num_blocks(num_sent_tokens), num_sent_tokens
            )
        except TransferError as error:
            raise RequestRejected(str(error)) from None
        send = SendHandoff(plan.handoff_id, offset, plan.num_tokens, plan.skip_tokens)
        await self._engine.submit(attempt.engine_request(prefill_only=True, send=send))

    def on_output(self, attempt: Attempt, output: EngineOutput) -> None:
        """Releases the handoff of a request that ends with its first token."""
        if output.finish is not None and output.finish is not Finish.CUT:
            self.release(attempt)

    def release(self, attempt: Attempt) -> None:
        """Ends the handoff. The engine must no longer write its staging."""
        if attempt.handoff is None:
            return
        if attempt.serves_fetch and attempt.handoff.handoff_id not in self._ended:
            self._report_unsent_prefix(attempt)
        # Failed sends too: the service keeps their staging until the engine has stopped writing.
        self._transfer.abort_send(attempt.handoff.handoff_id)
        self._remember(attempt.handoff.handoff_id)
        if self._sends.pop(attempt.handoff.handoff_id, None) is not None:
            self._on_change()

    def sends(self, handoff_id: bytes) -> bool:
        """Returns whether this worker sends a handoff, or has sent it lately."""
        return handoff_id in self._sends or handoff_id in self._ended

    def abort(self, handoff_id: bytes) -> None:
        """Aborts a send; IDs of ended sends and unknown IDs are ignored."""
        if (send := self._sends.pop(handoff_id, None)) is not None:
            self._remember(handoff_id)
            if send.attempt.serves_fetch:
                self._report_unsent_prefix(send.attempt)
            self._transfer.abort_send(handoff_id)
            self._on_change()

    def abort_all_but(self, handoff_ids: set[bytes]) -> None:
        for handoff_id in self._sends.keys() - handoff_ids:
            self.abort(handoff_id)

    def on_send_state(self, state: kv_transfer_pb2.LocalSendState) -> None:
        """Reports the result of a send, from the transfer service."""
        send = self._sends.pop(state.handoff_id, None)
        if send is None:
            return
        self._remember(state.handoff_id)
        report = send.report()
        report.epoch = state.epoch
        if state.state == kv_transfer_pb2.LocalSendState.STATE_COMMITTED:
            report.state = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
        else:
            report.state = kv_transfer_pb2.HANDOFF_STATE_FAILED
        report.reason, report.detail = state.reason, state.detail
        report.num_bytes, report.exposed_us = state.num_bytes, state.exposed_us
        report.transport, report.num_fallbacks = state.transport, state.num_fallbacks
        report.num_frames = state.num_frames
        report.reserve_us, report.open_us = state.reserve_us, state.open_us
        report.fill_us = state.fill_us
        self._report(send.attempt, report)
        self._on_change()

    def _remember(self, handoff_id: bytes) -> None:
        self._ended[handoff_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _report_unsent_prefix(self, attempt: Attempt) -> None:
        """Reports the end of an attempt that only sends a prefix; no output reports it."""
        report = _Send(attempt).report()
        report.state = kv_transfer_pb2.HANDOFF_STATE_FAILED
        report.reason = kv_transfer_pb2.REFUSAL_REASON_CANCELLED
        report.detail = "the worker does not send the prefix"
        self._report(attempt, report)

    async def _reserve(self, attempt: Attempt) -> SendHandoff | None:
        plan = attempt.handoff
        assert plan is not None
        # The send is registered before the service replies: its end may arrive before the reply,
        # and a cancellation must find it.
        send = self._sends[plan.handoff_id] = _Send(attempt)
        num_sent_tokens = plan.num_tokens - plan.skip_tokens
        try:
            offset = await self._transfer.open_send(
                plan.handoff_id,
                plan.target,
                self._layout.num_blocks(num_sent_tokens),
                num_sent_tokens,
                self._open_timeout_s,
            )
        except TransferError as error:
            self._sends.pop(plan.handoff_id, None)
            if attempt.serves_fetch:
                raise RequestRejected(str(error)) from None
            self._remember(plan.handoff_id)
            report = send.report()
            report.state = kv_transfer_pb2.HANDOFF_STATE_FAILED
            if isinstance(error, TransferRefused):
                report.reason = error.reason
            report.detail = str(error)
            report.reserve_us = report.total_us
            self._report(attempt, report)
            self._on_change()
            return None
        return SendHandoff(plan.handoff_id, offset, plan.num_tokens, plan.skip_tokens)
