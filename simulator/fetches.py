"""Prefixes that a simulated worker fetches from other workers, and sends to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.runtime.durations import to_seconds
from baton.runtime.kv.fetches import tokens_to_send
from baton.simulator.parts import Shape, SimulatedRequest
from baton.v1 import cluster_pb2, kv_transfer_pb2

_FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED


class Owner(Protocol):
    """The part of a simulated worker that its fetches use."""

    shape: Shape

    @property
    def now(self) -> float: ...
    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None: ...
    def load(self, request: SimulatedRequest) -> None: ...
    def loaded(
        self, request: SimulatedRequest, plan: cluster_pb2.FetchPlan, num_tokens: int
    ) -> None: ...
    def fetches_at(self, address: str) -> Fetches | None: ...
    def report_handoff(self, report: cluster_pb2.HandoffReport) -> None: ...


class Fetches:
    """The fetches of one simulated worker; owned by the worker.

    A worker sends one prefix after the other, at `Shape.network_bytes_per_s`.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        # Requests that wait for a fetch, by handoff; the first one loads it.
        self._waiting: dict[bytes, list[SimulatedRequest]] = {}
        # When the prefixes that this worker sends will have left.
        self._sent_at = 0.0

    # ---- Reader.

    def wait(self, request: SimulatedRequest, plan: cluster_pb2.FetchPlan) -> None:
        """Lets a request wait for a prefix that another worker sends."""
        waiting = self._waiting.setdefault(plan.handoff_id, [])
        if plan.num_tokens:
            request.fetches = plan
            waiting.insert(0, request)
        else:
            waiting.append(request)
        ends_at = self._owner.now + to_seconds(plan.timeout)
        self._owner.at(ends_at, self._late, plan.handoff_id, request)

    def end(self, handoff_id: bytes) -> None:
        """Lets the requests that wait for a fetch compute their prompts."""
        for request in self._waiting.pop(handoff_id, ()):
            if not request.ended:
                self._owner.load(request)

    def _late(self, handoff_id: bytes, request: SimulatedRequest) -> None:
        """Lets a request that has waited long enough compute its prompt."""
        if request not in self._waiting.get(handoff_id, ()):
            return
        if request.fetches is not None:
            self._report(handoff_id, _FAILED)
            self.end(handoff_id)
        else:
            self._waiting[handoff_id].remove(request)
            self._owner.load(request)

    def _arrived(self, handoff_id: bytes, num_tokens: int) -> bool:
        """Takes a prefix of this many tokens; returns whether it was wanted."""
        first = next(iter(self._waiting.get(handoff_id, ())), None)
        if first is None or first.fetches is None or first.ended:
            return False
        self._waiting[handoff_id].remove(first)
        self._owner.loaded(first, first.fetches, num_tokens)
        self.end(handoff_id)
        return True

    # ---- Holder.

    def send(self, handoff: cluster_pb2.HandoffPlan) -> None:
        """Sends a prefix after those that this worker sends already."""
        owner = self._owner
        num_tokens = handoff.num_tokens - handoff.skip_tokens
        num_bytes = round(num_tokens * owner.shape.kv_bytes_per_token)
        sending_s = num_bytes / owner.shape.network_bytes_per_s
        self._sent_at = max(owner.now, self._sent_at) + sending_s
        owner.at(self._sent_at, self._sent, handoff, num_bytes, owner.now)

    def shorten(self, request: SimulatedRequest) -> bool:
        """Lets a request that sends a prefix send only what this worker holds of it.

        Returns:
            False if that is not worth sending; nothing has changed then.
        """
        plan, size = request.sends, self._owner.shape.block_size_tokens
        assert plan is not None
        num_tokens = tokens_to_send(plan, request.num_held, size)
        if not num_tokens:
            return False
        request.sends = cluster_pb2.HandoffPlan()
        request.sends.CopyFrom(plan)
        request.sends.num_tokens = num_tokens
        request.num_cached = min(request.num_cached, num_tokens)
        request.num_host = num_tokens - request.num_cached
        request.hashes = request.hashes[: num_tokens // size]
        request.num_computed, request.num_uncomputed = num_tokens, 1
        request.num_tokens = request.num_prompt_tokens = num_tokens + 1
        return True

    def refuse(self, request: SimulatedRequest) -> None:
        """Reports that this worker does not hold the prefix that a request should send."""
        assert request.sends is not None
        self._report(request.sends.handoff_id, _FAILED)

    def _sent(self, handoff: cluster_pb2.HandoffPlan, num_bytes: int, filled_at: float) -> None:
        reader = self._owner.fetches_at(handoff.target)
        if reader is not None and reader._arrived(handoff.handoff_id, handoff.num_tokens):
            state = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
            self._report(handoff.handoff_id, state, num_bytes, self._owner.now - filled_at)
        else:
            self._report(handoff.handoff_id, _FAILED)

    def _report(
        self,
        handoff_id: bytes,
        state: kv_transfer_pb2.HandoffState.ValueType,
        num_bytes: int = 0,
        exposed_s: float = 0.0,
    ) -> None:
        self._owner.report_handoff(
            cluster_pb2.HandoffReport(
                handoff_id=handoff_id,
                state=state,
                num_bytes=num_bytes,
                exposed_us=round(exposed_s * 1e6),
            )
        )
