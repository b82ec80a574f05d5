"""Which transport carries a handoff between two services, and why.

The sender offers what it could use, best first, with each open; the receiver takes the first it can
use too and says why not a better one. So a pair needs no state beforehand, and an epoch after a
failure is negotiated like the first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.receiving import Choice
from baton.kvtransfer.sending import GRPC, SHM
from baton.kvtransfer.transports import shm_transport
from baton.kvtransfer.transports.shm_transport import PeerSegments
from baton.v1 import kv_transfer_pb2 as pb

# Peers whose transport is remembered for operators.
MAX_PEERS = 256
LINKED = ("nccl", "gloo")


class LinkTable(Protocol):
    """What of the service's links matters here; see links.Links, which needs torch."""

    def to(self, backend: str, target: str) -> str:
        """The id of the link to a target; raises LinkLost while there is none."""
        ...

    async def decided(self, backend: str, target: str) -> None:
        """Waits until the link to a target is there or has failed."""
        ...

    def brings(self, link_id: str) -> bool:
        """Whether a link to this service is there."""
        ...


class Negotiator:
    """Offers transports for what is sent from here, chooses for what comes in.

    Args:
        names: of the transports that the configuration allows, best first.
        segment_name: of this service's own staging.
        unavailable: why some of them cannot be used here.
    """

    def __init__(
        self, names: Sequence[str], segment_name: str, unavailable: Mapping[str, str] | None = None
    ) -> None:
        self._names, self._segment_name = tuple(names), segment_name
        self._unavailable = dict(unavailable or {})
        self._links: LinkTable | None = None
        self._domain = ""
        if SHM in names:
            try:
                self._domain = shm_transport.domain()
            except TransferError as error:
                self._unavailable[SHM] = str(error)
        # Why a transport was last not offered to a target.
        self._withheld: OrderedDict[str, dict[str, str]] = OrderedDict()
        # How the last handoff to each target went.
        self._peers: OrderedDict[str, pb.PeerTransport] = OrderedDict()
        self._segments = PeerSegments()

    def use(self, links: LinkTable) -> None:
        """Where the links of those transports are that need them; before anything else."""
        self._links = links

    # ---- Sending.

    async def ready(self, target: str) -> None:
        """Waits for what the first open to a target cannot do without.

        A link is not waited for when another transport can stand in for it.
        """
        usable = [name for name in self._names if name not in self._unavailable]
        if self._links is not None and all(name in LINKED for name in usable):
            for name in usable:
                await self._links.decided(name, target)

    def offers(self, target: str, tried: Container[str]) -> list[pb.TransportOffer]:
        """What may carry an epoch to a target, best first."""
        offers, withheld = [], self._withheld.pop(target, {})
        for name in self._names:
            try:
                offers.append(self._offer(name, target, tried))
            except TransferError as error:
                withheld[name] = str(error)
        self._withheld[target] = withheld
        if len(self._withheld) > MAX_PEERS:
            self._withheld.popitem(last=False)
        return offers

    def opened(self, target: str, reply: pb.PushReply, offered: Container[str]) -> None:
        """A target has chosen; one that was not offered is the sender's to refuse."""
        if reply.transport not in self._names:
            return
        # As it was when the offer was made: by now a link may be there.
        withheld = self._withheld.get(target, {})
        reasons = [
            f"{name}: {withheld[name]}"
            for name in self._names[: self._names.index(reply.transport)]
            if name not in offered and name in withheld
        ]
        if reply.transport_reason:
            reasons.append(reply.transport_reason)
        self._peers.pop(target, None)
        self._peers[target] = pb.PeerTransport(
            target=target, transport=reply.transport, reason="; ".join(reasons)
        )
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)

    def peers(self) -> list[pb.PeerTransport]:
        """How each target was reached last."""
        return list(self._peers.values())

    def _offer(self, name: str, target: str, tried: Container[str]) -> pb.TransportOffer:
        """Raises TransferError with the reason why not."""
        if name in self._unavailable:
            raise TransferError(self._unavailable[name])
        if name in tried:
            raise TransferError("failed")
        offer = pb.TransportOffer(name=name)
        if name == SHM:
            offer.shm_domain, offer.shm_segment = self._domain, self._segment_name
        elif name in LINKED:
            if self._links is None:
                raise TransferError("there are no links")
            offer.link_id = self._links.to(name, target)
        return offer

    # ---- Receiving.

    def choose(self, stream: int, opened: pb.PushOpen) -> Choice:
        """The first of the offers that works here too.

        Raises:
            MalformedFrame: none of them does.
        """
        self._segments.detach(stream)
        problems = []
        for offer in opened.offers or [pb.TransportOffer(name=GRPC)]:
            try:
                self._accept(stream, offer)
            except TransferError as error:
                problems.append(f"{offer.name}: {error}")
            else:
                return Choice(offer.name, "; ".join(problems), offer.link_id)
        raise MalformedFrame(
            f"none of the offered transports can be used: {'; '.join(problems)}",
            pb.REFUSAL_REASON_TRANSPORT,
        )

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        """The data frame that a reference stands for. Raises MalformedFrame."""
        return self._segments.resolve(stream, frame, num_bytes)

    def forget(self, stream: int) -> None:
        """An incoming stream is over."""
        self._segments.detach(stream)

    def close(self) -> None:
        """Gives back what belongs to others."""
        self._segments.close()

    def _accept(self, stream: int, offer: pb.TransportOffer) -> None:
        """Raises TransferError with the reason why not."""
        if offer.name not in self._names:
            raise TransferError(f"not among the receiver's kv_transfer.transports {self._names}")
        if offer.name in self._unavailable:
            raise TransferError(self._unavailable[offer.name])
        if offer.name == SHM:
            if offer.shm_domain != self._domain:
                raise TransferError("sender and receiver do not share memory")
            self._segments.attach(stream, offer.shm_segment)
        if offer.name in LINKED and not (self._links and self._links.brings(offer.link_id)):
            raise TransferError("the link is over")
