"""The push: the gRPC stream that belongs to one handoff, as the transfer service uses it.

The sender opens a push for each handoff. PushReply messages come back on it. Every handoff is
opened and ended on its push, whichever transport moves its blocks, so the state machines of both
ends are the same for every transport. service/push_stream.py implements these protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2

# The gRPC service that pushes and links are methods of.
SERVICE = "baton.v1.KvTransfer"
PUSH_METHOD = f"/{SERVICE}/Push"


class PushLost(TransferError):
    """The push ended before its handoff did, or the receiver was never reached."""


class Push(Protocol):
    """The sending end of one push. One task sends, another task receives."""

    async def send(self, frames: Sequence[OutgoingFrame]) -> None:
        """Sends frames in this order; waits while the receiver takes no more.

        The payloads are read before this method first waits. Raises PushLost.
        """
        ...

    async def receive(self) -> kv_transfer_pb2.PushReply | None:
        """Returns the next reply; None when the receiver has ended the push. Raises PushLost."""
        ...

    async def finish(self) -> None:
        """Tells the receiver that no frame follows. Raises PushLost."""
        ...

    def cancel(self) -> None:
        """Ends the push now; the receiver sees a lost stream. Idempotent."""
        ...


class PushDialer(Protocol):
    """Opens pushes to other transfer services."""

    def open_push(self, target: str) -> Push:
        """Begins a push to a service's address; connecting goes on in the background."""
        ...

    async def close(self) -> None:
        """Cancels every push and closes every connection."""
        ...


class IncomingPush(Protocol):
    """The receiving end of one push.

    Attributes:
        sender: Address of the sender's connection, as gRPC names it.
    """

    sender: str

    def reply(self, reply: kv_transfer_pb2.PushReply) -> None:
        """Queues a reply; replies are written in this order."""
        ...

    def end(self) -> None:
        """Ends the push once the queued replies are written. Idempotent."""
        ...


class PushHandler(Protocol):
    """The transfer service, as the gRPC port calls it for incoming pushes."""

    def push_started(self, push: IncomingPush) -> int:
        """Adds a new push; returns its stream number."""
        ...

    def push_frame(self, stream: int, frame: Frame) -> None:
        """Takes one frame. The caller may reuse the payload's memory when this returns."""
        ...

    def push_malformed(self, stream: int, error: MalformedFrame) -> None:
        """Takes the error of bytes that are not a frame."""
        ...

    def push_ended(self, stream: int) -> None:
        """Forgets a push that has ended for any reason. Called exactly once for each push."""
        ...
