"""The interface of a transport: one way to move the blocks of handoffs between two services.

How a handoff uses it: the sender calls `offer` for each transport that the configuration lists,
and the open carries the offers. The receiver calls `accept` with each offer, best first, until one
succeeds. The sender then turns each run of blocks into a frame (`frame`), and the handoff's stream
(service/handoff_stream.py) carries the frames to the receiver.

A transport may let its frames be references: they say where the blocks are in the sender's memory,
and the receiver's transport reads them from there (`pull`). The sender never writes to the
receiver's memory: no transport can stop a remote write that is late.

To add a transport, write a module with a subclass and name the class in
runtime/kv/kv_transports.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.runtime.security.dial import PLAIN, Dial
from baton.v1 import kv_transfer_pb2 as pb


@dataclass(frozen=True, slots=True)
class Pull:
    """Bytes of the sender's memory to read into staging; the transport tells how that ended.

    Attributes:
        serial: Number of the pull, unique in this service.
        stream: The stream that carried the reference; its transport reads.
        source: Offset of the bytes in the sender's memory.
        target: Offset of the bytes in this service's segment.
        num_bytes: Number of bytes.
    """

    serial: int
    stream: int
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EndedPull:
    """A pull that has ended: nothing can write to its target any more.

    Attributes:
        serial: Number of the pull (Pull.serial).
        digest: XXH3-64 of the bytes in the target; None when the read failed.
    """

    serial: int
    digest: int | None


class TransportHandler(Protocol):
    """The transfer service, as transports call it on its event loop."""

    def pulls_ended(self, ended: Sequence[EndedPull]) -> None:
        """Takes pulls that have ended. Each pull is told once."""
        ...

    def fingerprint(self) -> pb.KvFingerprint | None:
        """Returns the fingerprint of this service's KV cache; None until the engine gives it."""
        ...


@dataclass(frozen=True, slots=True)
class ServiceContext:
    """The properties of a transfer service that its transports need.

    Attributes:
        segment_name: Name of the shared-memory segment that holds the service's staging.
        memory: That segment.
        config: The `kv_transfer` section.
        dial: How other services are dialled.
        within_host: Whether bytes without TLS must not leave this host.
    """

    segment_name: str
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    config: KvTransferConfig = field(default_factory=KvTransferConfig)
    dial: Dial = PLAIN
    within_host: bool = False


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

    def serve(self, server: grpc.aio.Server, handler: TransportHandler) -> None:
        """Adds the transport's methods to the gRPC port. Called once, before the port serves."""
        del server, handler

    async def started(self) -> None:
        """Waits until the transport can be offered and accepted, if that needs time and no peer.

        Called once, after `serve` and before other services are answered.
        """
        return

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

    def passed_over(self) -> None:
        """Called when a receiver took a worse transport than this one for a handoff."""
        return

    def frame(self, blocks: OutgoingBlocks) -> OutgoingFrame:
        """Returns the frame that carries a run of blocks: a data frame with its bytes."""
        return blocks.data_frame()

    # ---- Receiving.

    @abstractmethod
    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        """Accepts an offer for the epoch that a stream carries.

        Args:
            stream: Number of the incoming stream.
            offer: Offer with this transport's name.

        Returns:
            The size in bytes of the sender's memory that references may name; 0 if this transport
            has no references.

        Raises:
            TransferError: The offer cannot be accepted; says why.
        """

    def pull(self, pull: Pull) -> None:
        """Begins to read what a reference names; `TransportHandler.pulls_ended` tells the end.

        Called only for a stream that this transport has accepted with a size, and with a range
        inside that size. May not wait.
        """
        raise AssertionError(f"{self.name} has no references")

    def end(self, stream: int) -> None:
        """Releases what `accept` took for a stream, once its pulls have ended. Idempotent."""
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

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        raise TransferError(self._reason)
