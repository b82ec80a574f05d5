"""Decides which transport carries a handoff between two services, and records why.

Each open carries the transports that the sender can use, best first. The receiver takes the first
one that it can use too, and its reply says why it took no better one. So two services need no
common state before the first handoff, and the epoch after a failure is negotiated like the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from baton.kvtransfer.errors import MalformedFrame, TransferError, shortened
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.kvtransfer.transports.transport import Pull, Transport
from baton.runtime.kv.kv_transports import UNNAMED_TRANSPORT
from baton.v1 import kv_transfer_pb2 as pb

# Number of targets for which operators can see the transport that was used last.
MAX_PEERS = 256


@dataclass(frozen=True, slots=True)
class Choice:
    """The transport that the receiver takes for an epoch.

    Attributes:
        transport: Name of the transport.
        reason: Why no better one was taken; empty when it is the best.
        source_bytes: Size of the sender's memory that references of the epoch may name; 0 when the
            transport has no references.
    """

    transport: str
    reason: str = ""
    source_bytes: int = 0


class Negotiator:
    """Offers transports for outgoing handoffs and chooses one for incoming handoffs.

    Args:
        transports: The transports that the configuration lists, best first.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self._names = tuple(self._transports)
        # By target: why each transport was not in the latest offer.
        self._withheld: OrderedDict[str, dict[str, str]] = OrderedDict()
        # By target: the transport of the latest handoff.
        self._peers: OrderedDict[str, pb.PeerTransport] = OrderedDict()
        # By number of the incoming stream: the transport that was accepted for it.
        self._accepted: dict[int, Transport] = {}

    # ---- Sending.

    async def ready(self, target: str) -> None:
        """Waits until at least one transport can be offered to a target, or all have failed.

        A transport that takes time to connect is not waited for when another one can be used now.
        """
        if any(self._can_offer(transport, target) for transport in self._transports.values()):
            return
        for transport in self._transports.values():
            await transport.prepare(target)

    def offers(self, target: str, tried: Container[str]) -> list[pb.TransportOffer]:
        """Returns the offers for an epoch to a target, best first.

        Args:
            target: Address of the receiving service.
            tried: Names of the transports that failed for this handoff.
        """
        offers, withheld = [], self._withheld.pop(target, {})
        for name, transport in self._transports.items():
            try:
                if name in tried:
                    raise TransferError("failed")
                offers.append(transport.offer(target))
            except TransferError as error:
                withheld[name] = str(error)
        self._withheld[target] = withheld
        if len(self._withheld) > MAX_PEERS:
            self._withheld.popitem(last=False)
        return offers

    def opened(self, target: str, reply: pb.HandoffReply, offered: Container[str]) -> None:
        """Records a target's choice. The sender refuses a choice that was not offered."""
        if reply.transport not in self._transports:
            return
        # The reasons are those of the offer: by now the transport may be usable.
        withheld = self._withheld.get(target, {})
        better = self._names[: self._names.index(reply.transport)]
        reasons = [
            f"{name}: {withheld[name]}"
            for name in better
            if name not in offered and name in withheld
        ]
        for name in better:
            self._transports[name].passed_over()
        if reply.transport_reason:
            reasons.append(shortened(reply.transport_reason))
        self._peers.pop(target, None)
        self._peers[target] = pb.PeerTransport(
            target=target, transport=reply.transport, reason="; ".join(reasons)
        )
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def peers(self) -> list[pb.PeerTransport]:
        """Returns the transport of the latest handoff to each target."""
        return list(self._peers.values())

    def frame(self, transport: str, blocks: OutgoingBlocks) -> OutgoingFrame:
        """Returns the frame by which a transport carries a run of blocks."""
        return self._transports[transport].frame(blocks)

    @staticmethod
    def _can_offer(transport: Transport, target: str) -> bool:
        try:
            transport.offer(target)
        except TransferError:
            return False
        return True

    # ---- Receiving.

    def choose(self, stream: int, opened: pb.HandoffOpen) -> Choice:
        """Takes the first of an open's offers that this service can use too.

        Raises:
            MalformedFrame: No offer can be used; the message says why for each.
        """
        self.end(stream)
        problems = []
        for offer in opened.offers or [pb.TransportOffer(name=UNNAMED_TRANSPORT)]:
            try:
                source_bytes = self._accept(stream, offer)
            except TransferError as error:
                problems.append(f"{offer.name}: {error}")
            else:
                return Choice(offer.name, shortened("; ".join(problems)), source_bytes)
        raise MalformedFrame(
            f"none of the offered transports can be used: {'; '.join(problems)}",
            pb.REFUSAL_REASON_TRANSPORT,
        )

    def pull(self, pull: Pull) -> None:
        """Begins a pull by the transport that was accepted for its stream."""
        self._accepted[pull.stream].pull(pull)

    def end(self, stream: int) -> None:
        """Releases the resources that a transport holds for an incoming stream. Idempotent."""
        if (transport := self._accepted.pop(stream, None)) is not None:
            transport.end(stream)

    def _accept(self, stream: int, offer: pb.TransportOffer) -> int:
        """Returns the size of the memory that references may name (Transport.accept).

        Raises TransferError when an offer cannot be accepted; says why.
        """
        if (transport := self._transports.get(offer.name)) is None:
            raise TransferError(f"not among the receiver's kv_transfer.transports {self._names}")
        source_bytes = transport.accept(stream, offer)
        self._accepted[stream] = transport
        return source_bytes

    async def started(self) -> None:
        """Waits until every transport is as ready as it can be without other services."""
        for transport in self._transports.values():
            await transport.started()

    async def close(self) -> None:
        """Closes every transport."""
        for transport in self._transports.values():
            await transport.close()
