"""The gRPC stream that belongs to one handoff, as the transfer service uses it.

The sender opens a stream for each handoff. HandoffReply messages come back on it. Every handoff is
opened and ended on its stream, whichever transport moves its blocks, so the state machines of both
ends are the same for every transport. grpc_stream.py implements these protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2


class StreamLost(TransferError):
    """The stream ended before its handoff did, or the receiver was never reached."""


class OutgoingStream(Protocol):
    """The sending end of a handoff's stream. One task sends, another task receives."""

    async def send(self, frames: Sequence[OutgoingFrame]) -> None:
        """Sends frames in this order; waits while the receiver takes no more.

        The payloads are read before this method first waits. Raises StreamLost.
        """
        ...

    async def receive(self) -> kv_transfer_pb2.HandoffReply | None:
        """Returns the next reply; None when the receiver has ended the stream.

        Raises StreamLost.
        """
        ...

    async def finish(self) -> None:
        """Tells the receiver that no frame follows. Raises StreamLost."""
        ...

    def cancel(self) -> None:
        """Ends the stream now; the receiver sees a lost stream. Idempotent."""
        ...


class StreamDialer(Protocol):
    """Opens streams to other transfer services."""

    def open_stream(self, target: str) -> OutgoingStream:
        """Begins a stream to a service's address; connecting goes on in the background."""
        ...

    async def close(self) -> None:
        """Cancels every stream and closes every connection."""
        ...


class IncomingStream(Protocol):
    """The receiving end of a handoff's stream.

    Attributes:
        sender: Address of the sender's connection, as gRPC names it.
    """

    sender: str

    def reply(self, reply: kv_transfer_pb2.HandoffReply) -> None:
        """Queues a reply; replies are written in this order."""
        ...

    def end(self) -> None:
        """Ends the stream once the queued replies are written. Idempotent."""
        ...


class StreamHandler(Protocol):
    """The transfer service, as the gRPC port calls it for incoming streams."""

    def stream_started(self, incoming: IncomingStream) -> int:
        """Adds a new stream; returns its number."""
        ...

    def stream_frame(self, stream: int, frame: Frame) -> None:
        """Takes one frame. The caller may reuse the payload's memory when this returns."""
        ...

    def stream_malformed(self, stream: int, error: MalformedFrame) -> None:
        """Takes the error of bytes that are not a frame."""
        ...

    def stream_ended(self, stream: int) -> None:
        """Forgets a stream that has ended for any reason. Called exactly once for each stream."""
        ...
