"""The requests that wait for handoffs, and the handoffs' states; runs beside vLLM's scheduler."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.v1 import kv_transfer_pb2

# Number of ended handoffs remembered before their requests come. When there are more, the oldest
# is forgotten, and its request waits until its deadline.
_MAX_ENDED_AHEAD = 4096
_COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
_FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
_RELEASED = kv_transfer_pb2.HANDOFF_STATE_RELEASED


@dataclass(slots=True)
class Receive:
    """A request that waits for a handoff.

    Attributes:
        request_id: vLLM's ID of the request.
        handoff_id: ID of the handoff, 16 bytes.
        num_tokens: Number of tokens of the prompt, from the first, that the handoff covers.
        skip_tokens: Number of these tokens, from the first, that the handoff leaves out.
        deadline: When the wait ends, by time.monotonic.
        is_fetch: Whether the request computes the tokens that the handoff does not bring.
        only_waits: Whether another request fetches the handoff and owns it. This request loads
            nothing; it starts when the other one has loaded.
        over: True once the handoff was loaded or given up, or there was nothing to load.
        num_shards: Number of shards of the sender's cache, known when the handoff is committed.
        has_draft: Whether the handoff holds the layers of a draft, known then too.
    """

    request_id: str
    handoff_id: bytes
    num_tokens: int
    skip_tokens: int
    deadline: float
    is_fetch: bool
    only_waits: bool
    over: bool = False
    num_shards: int = 0
    has_draft: bool = False


class Receives:
    """The requests that wait for handoffs; HandoffScheduler owns this object.

    Args:
        port: The scheduler's connection to the transfer service.
    """

    def __init__(self, port: EnginePort) -> None:
        self._port = port
        self._receives: dict[str, Receive] = {}
        # Committed handoffs that were not loaded. The transfer service bounds their number.
        self._committed: dict[bytes, kv_transfer_pb2.LocalHandoffState] = {}
        # Handoffs that failed, and that were released; their requests may not have come yet.
        self._failed: OrderedDict[bytes, None] = OrderedDict()
        self._released: OrderedDict[bytes, None] = OrderedDict()
        port.subscribe()

    def add(self, request_id: str, order: ReceiveHandoff, now: float) -> Receive:
        """Adds a request with a receive.

        Args:
            request_id: vLLM's ID of the request.
            order: The handoff that the request loads.
            now: Current time.monotonic(), in seconds.
        """
        self._receives[request_id] = made = Receive(
            request_id,
            order.handoff_id,
            order.num_tokens,
            order.skip_tokens,
            now + order.timeout_s,
            order.is_fetch,
            order.only_waits,
        )
        return made

    def waiting(self, request_id: str) -> Receive | None:
        """Returns the receive of a request; None if it has none, or none any more."""
        receive = self._receives.get(request_id)
        return None if receive is None or receive.over else receive

    def remove(self, request_id: str) -> Receive | None:
        """Forgets a request that has ended; returns its receive if that was not over."""
        receive = self.waiting(request_id)
        self._receives.pop(request_id, None)
        return receive

    def poll(self) -> None:
        """Takes the changes of handoffs' states from the transfer service."""
        for state in self._port.poll():
            if state.state == _COMMITTED:
                self._committed[state.handoff_id] = state
            else:
                self._committed.pop(state.handoff_id, None)
            for ended, handoffs in ((_FAILED, self._failed), (_RELEASED, self._released)):
                if state.state == ended:
                    handoffs[state.handoff_id] = None
                    if len(handoffs) > _MAX_ENDED_AHEAD:
                        handoffs.popitem(last=False)

    def has_come(self, receive: Receive) -> bool:
        """Returns whether a handoff is committed; its receive then says how much it brings."""
        committed = self._committed.get(receive.handoff_id)
        if committed is None:
            return False
        receive.num_shards, receive.has_draft = committed.num_shards, committed.has_draft
        if receive.is_fetch:
            # The holder may have lacked blocks at the end.
            brought = receive.skip_tokens + committed.num_tokens
            receive.num_tokens = min(receive.num_tokens, brought)
        return True

    def may_come(self, receive: Receive) -> bool:
        """Returns whether a handoff that has not come may still come, its deadline left out."""
        return receive.handoff_id not in self._failed and self._port.alive

    def is_on_its_way(self, receive: Receive, now: float) -> bool:
        """Returns whether a request waits for a handoff that has neither come nor failed."""
        if receive.only_waits:
            return not self.is_ended(receive, now)
        has_come = receive.handoff_id in self._committed
        return not has_come and self.may_come(receive) and now < receive.deadline

    def is_ended(self, receive: Receive, now: float) -> bool:
        """Returns whether a request need not wait for another request's fetch any more."""
        ended = receive.handoff_id in self._failed or receive.handoff_id in self._released
        return ended or not self._port.alive or now >= receive.deadline

    def end(self, receive: Receive) -> None:
        """Ends the wait of a request, and forgets its handoff."""
        receive.over = True
        if receive.only_waits:
            return
        self._committed.pop(receive.handoff_id, None)
        if not receive.is_fetch:
            # Other requests may wait for the same fetch.
            self._failed.pop(receive.handoff_id, None)
