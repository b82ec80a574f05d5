"""The interface of a transport: one way to move the blocks of handoffs between two services.

How a handoff uses it: the sender calls `offer` for each transport that the configuration lists,
and the open carries the offers. The receiver calls `accept` with each offer, best first, until one
succeeds. The sender then turns each run of blocks into a frame (`frame`) and sends batches of
frames (`send`). Frames reach the receiver through the handoff's push (push.py) or through a link.

A link is a connection that a transport itself keeps between two services. It carries frames of many
handoffs beside their pushes, and an offer names it by `link_id`.

To add a transport, write a module with a subclass and name the class in runtime/kv_transports.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc

from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.push import Push
from baton.kvtransfer.sending import Batch, Outgoing, OutgoingBlocks
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.kv_transfer_config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

_T = TypeVar("_T")


class LinkLost(TransferError):
    """A link has ended, or could not be made. The message says why."""


class LinkHandler(Protocol):
    """The transfer service, as transports with links call it."""

    def fingerprint(self) -> pb.KvFingerprint | None:
        """Returns the fingerprint of this service's KV cache; None until the engine gives it."""
        ...

    def link_frame(self, link_id: str, frame: Frame) -> None:
        """Takes one frame. The link may reuse the payload's memory when this returns."""
        ...

    def link_lost(self, link_id: str, detail: str) -> None:
        """Fails the epochs that a link carried: the link has ended for any reason."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The properties of a transfer service that its transports need.

    Attributes:
        segment_name: Name of the shared-memory segment that holds the service's staging.
        config: The `kv_transfer` section.
        dial: How other services are dialled.
        within_host: Whether bytes without TLS must not leave this host.
    """

    segment_name: str
    config: KvTransferConfig = field(default_factory=KvTransferConfig)
    dial: Dial = PLAIN
    within_host: bool = False
    _shared: dict[type[Any], Any] = field(default_factory=dict)

    def share(self, kind: type[_T], make: Callable[[], _T]) -> _T:
        """Returns the one object of this kind that several transports of the service use."""
        if kind not in self._shared:
            self._shared[kind] = make()
        shared: _T = self._shared[kind]
        return shared


class Transport(ABC):
    """One way to move blocks. A transfer service makes one object for each configured name.

    Everything is called on the service's event loop.

    Args:
        name: Name under which the configuration and the offers know the transport.
        service: The service that makes it.

    Raises:
        TransferError: This process cannot use the transport; the message says why.
    """

    def __init__(self, name: str, service: ServiceContext) -> None:
        self.name, self._service = name, service

    def serve(self, server: grpc.aio.Server, handler: LinkHandler) -> None:
        """Adds the transport's methods to the gRPC port. Called once, before the port serves."""
        del server, handler

    async def close(self) -> None:
        """Ends everything and waits until no payload is read any more. Idempotent."""
        return

    # ---- Sending.

    @abstractmethod
    def offer(self, target: str) -> pb.TransportOffer:
        """Returns the offer for an open to this address.

        Raises:
            TransferError: The transport cannot be used for this target now; says why.
        """

    async def prepare(self, target: str) -> None:
        """Waits until `offer` has its final answer for this address."""
        del target

    def frame(self, blocks: OutgoingBlocks) -> Outgoing:
        """Returns the frame that carries a run of blocks: a data frame with its bytes."""
        return blocks.data_frame()

    async def send(self, push: Push, batch: Batch) -> None:
        """Sends a batch of frames of one handoff, in order.

        Raises:
            PushLost: The handoff's push has ended.
            LinkLost: The link has ended; LinkHandler.link_lost is called as well.
        """
        await push.send(batch.frames)

    # ---- Receiving.

    @abstractmethod
    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        """Accepts an offer for the epoch that a push carries.

        Args:
            stream: Number of the incoming push.
            offer: Offer with this transport's name.

        Raises:
            TransferError: The offer cannot be accepted; says why.
        """

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        """Returns the data frame that a reference frame stands for.

        Args:
            stream: Number of the push that carried the reference.
            frame: The reference.
            num_bytes: Size of the blocks in bytes.

        Raises:
            MalformedFrame: This transport has no references, or the reference is wrong.
        """
        raise MalformedFrame("a reference on a stream that has not chosen shared memory")

    def end(self, stream: int) -> None:
        """Releases the resources that `accept` took for a push. Idempotent."""
        del stream


class UnavailableTransport(Transport):
    """Stands in for a configured transport that this process cannot use.

    Args:
        name: Name of the transport.
        service: The service that uses it.
        reason: Why the transport cannot be used.
    """

    def __init__(self, name: str, service: ServiceContext, reason: str) -> None:
        super().__init__(name, service)
        self._reason = reason

    def offer(self, target: str) -> pb.TransportOffer:
        raise TransferError(self._reason)

    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        raise TransferError(self._reason)
