"""What the transfer service needs of the stream that carries a handoff; gRPC has it.

A push is one handoff's frames from one service to another, with PushReply messages coming back.
Where shared memory or a link moves the bytes, the push still opens the handoff, ends it, and brings
the replies: the state machines on both ends stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.sending import Outgoing
from baton.v1 import kv_transfer_pb2


class PushLost(TransferError):
    """The other end of a push is gone, or was never there. The message says why."""


class Push(Protocol):
    """The sending end of one push. One task sends, another receives."""

    async def send(self, frames: Sequence[Outgoing]) -> None:
        """Sends frames in this order; waits while the receiver takes no more.

        The payloads are read before this first waits. Raises PushLost.
        """
        ...

    async def receive(self) -> kv_transfer_pb2.PushReply | None:
        """The next reply; None when the receiver has ended the push. Raises PushLost."""
        ...

    async def finish(self) -> None:
        """Says that nothing more follows. Raises PushLost."""
        ...

    def cancel(self) -> None:
        """Ends the push now; the receiver loses it. Idempotent."""
        ...


class Transport(Protocol):
    """The sending side: opens pushes."""

    def open_push(self, target: str) -> Push:
        """Begins a push to a service's address; connecting goes on in the background."""
        ...

    async def close(self) -> None:
        """Cancels every push and closes every connection."""
        ...


class IncomingPush(Protocol):
    """The receiving end of one push."""

    def reply(self, reply: kv_transfer_pb2.PushReply) -> None:
        """Queues a reply; they are written in this order."""
        ...

    def end(self) -> None:
        """Ends the push once the queued replies are written. Idempotent."""
        ...


class PushHandler(Protocol):
    """What receives incoming pushes: the transfer service."""

    def push_started(self, push: IncomingPush) -> int:
        """A new push; returns its number."""
        ...

    def push_frame(self, stream: int, frame: Frame) -> None:
        """A frame; its payload is the transport's again when this returns."""
        ...

    def push_malformed(self, stream: int, error: MalformedFrame) -> None:
        """Something that is no frame."""
        ...

    def push_ended(self, stream: int) -> None:
        """The push is over, whyever. Exactly once."""
        ...
