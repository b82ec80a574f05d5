"""Tracks the handoffs and the fetched prefixes that this worker sends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from baton.kvtransfer.errors import TransferError, TransferRefused
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.v1 import cluster_pb2, kv_transfer_pb2

# Number of ended sends that are remembered. The cancellation of a request comes while it decodes on
# another worker, often long after its send.
_MAX_ENDED = 16_384


@dataclass(frozen=True, slots=True)
class Send:
    """A handoff that this worker sends.

    Attributes:
        plan: The handoff.
        traceparent: Trace of the client's request; empty: none.
        request_name: The coordinator's name of the request whose attempt sends it
            (RequestSpec.request_id); empty: another worker fetches a prefix.
        attempt: Number of the attempt.
        begun_at: Start by time.monotonic().
    """

    plan: cluster_pb2.HandoffPlan
    traceparent: str
    request_name: str = ""
    attempt: int = 0
    begun_at: float = field(default_factory=monotonic)

    def report(self) -> cluster_pb2.HandoffReport:
        """Returns a report on this send; the caller fills in the result."""
        return cluster_pb2.HandoffReport(
            request_id=self.request_name,
            attempt=self.attempt,
            handoff_id=self.plan.handoff_id,
            total_us=round((monotonic() - self.begun_at) * 1e6),
        )


class Sends:
    """Owns the sends of this worker, from their reservation until the receiver has verified them.

    On this worker a request ends with its first token, but its send may still go on.

    Args:
        transfer: Client of the worker's transfer service.
        layout: Layout of the engine's KV cache.
        open_timeout_s: Longest wait for staging, here and at the receiver.
        report: Called with the trace and the result of each handoff.
        on_change: Called when `num_live` has decreased.
    """

    def __init__(
        self,
        transfer: TransferClient,
        layout: KvLayout,
        *,
        open_timeout_s: float,
        report: Callable[[str, cluster_pb2.HandoffReport], None],
        on_change: Callable[[], None],
    ) -> None:
        self._transfer, self._layout = transfer, layout
        self._open_timeout_s, self._report, self._on_change = open_timeout_s, report, on_change
        self._live: dict[bytes, Send] = {}
        # IDs of sends that are over, oldest first. Nothing more is reported of them.
        self._ended: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_live(self) -> int:
        """Handoffs that are added and not yet committed, failed or aborted."""
        return len(self._live)

    def knows(self, handoff_id: bytes) -> bool:
        """Returns whether this worker sends a handoff, or has sent it lately."""
        return handoff_id in self._live or handoff_id in self._ended

    def add(self, send: Send) -> None:
        """Registers a send before its reservation, so that its end and a cancellation find it."""
        self._live[send.plan.handoff_id] = send

    async def reserve(self, plan: cluster_pb2.HandoffPlan) -> SendHandoff:
        """Reserves staging, for an added send.

        Raises:
            TransferError: The transfer service refuses the send, or has ended.
        """
        num_tokens = plan.num_tokens - plan.skip_tokens
        offset = await self._transfer.open_send(
            plan.handoff_id,
            plan.target,
            self._layout.num_blocks(num_tokens),
            num_tokens,
            self._open_timeout_s,
        )
        return SendHandoff(plan.handoff_id, offset, plan.num_tokens, plan.skip_tokens)

    async def shrink(self, plan: cluster_pb2.HandoffPlan, num_tokens: int) -> SendHandoff:
        """Reduces a reservation to the blocks before prompt token `num_tokens`.

        Raises:
            TransferError: The transfer service refuses this, or has ended.
        """
        num_sent_tokens = num_tokens - plan.skip_tokens
        offset = await self._transfer.shrink_send(
            plan.handoff_id, self._layout.num_blocks(num_sent_tokens), num_sent_tokens
        )
        return SendHandoff(plan.handoff_id, offset, num_tokens, plan.skip_tokens)

    def fail(self, handoff_id: bytes, error: TransferError) -> None:
        """Reports that staging could not be reserved."""
        if (send := self._pop(handoff_id)) is None:
            return
        report = send.report()
        report.state = kv_transfer_pb2.HANDOFF_STATE_FAILED
        if isinstance(error, TransferRefused):
            report.reason = error.reason
        report.detail = str(error)
        report.reserve_us = report.total_us
        self._report(send.traceparent, report)
        self._on_change()

    def release(self, handoff_id: bytes) -> None:
        """Ends a handoff. The engine must no longer write its staging."""
        send = self._pop(handoff_id)
        # Failed sends too: the service keeps their staging until the engine has stopped writing.
        self._transfer.abort_send(handoff_id)
        if send is None:
            return
        if not send.request_name:
            # No output reports the end of a fetch.
            report = send.report()
            report.state = kv_transfer_pb2.HANDOFF_STATE_FAILED
            report.reason = kv_transfer_pb2.REFUSAL_REASON_CANCELLED
            report.detail = "the worker does not send the prefix"
            self._report(send.traceparent, report)
        self._on_change()

    def abort(self, handoff_id: bytes) -> None:
        """Aborts a send; IDs of ended sends and unknown IDs are ignored."""
        if handoff_id in self._live:
            self.release(handoff_id)

    def abort_all_but(self, handoff_ids: set[bytes]) -> None:
        for handoff_id in self._live.keys() - handoff_ids:
            self.release(handoff_id)

    def on_send_state(self, state: kv_transfer_pb2.LocalSendState) -> None:
        """Reports the result of a send, from the transfer service."""
        if state.handoff_id not in self._live or (send := self._pop(state.handoff_id)) is None:
            return
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
        self._report(send.traceparent, report)
        self._on_change()

    def _pop(self, handoff_id: bytes) -> Send | None:
        """Remembers that a send is over; returns the send if it was live."""
        self._ended[handoff_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return self._live.pop(handoff_id, None)
