"""The carriers of messages in the simulated network: streams and workers' sockets."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from tests.kvtransfer.simulated_network import World
    from tests.kvtransfer.simulated_prefill import Send


@functools.lru_cache(1024)
def truth(handoff_id: bytes, num_bytes: int) -> bytes:
    """Returns the KV cache of a handoff's prompt."""
    return random.Random(handoff_id.hex()).randbytes(num_bytes)


def joined(batch: Sequence[OutgoingFrame]) -> bytes:
    """Returns a batch as bytes, with the current contents of staging."""
    return b"".join(part for out in batch for part in (out.header, out.payload))


class Stream:
    """One stream. None in a queue is the end of that direction.

    Attributes:
        awake: Whether the sender may have a batch for it.
        is_cut: Whether messages that are written are lost.
        ending: Whether the receiver ignores messages that still arrive.
    """

    def __init__(self, number: int, send: Send) -> None:
        self.number, self.attempt = number, send
        self.source, self.target = send.source, send.target
        self.up: deque[bytes | None] = deque()
        self.down: deque[pb.HandoffReply | None] = deque()
        self.awake = True
        self.is_cut = self.ending = self.sender_over = self.receiver_over = False

    def send(self, frames: Sequence[OutgoingFrame]) -> None:
        """Puts a batch on its way; the payloads are read now."""
        if not self.is_cut:
            self.up.append(joined(frames))

    def cut(self, keep_up: int = 0, keep_down: int = 0) -> None:
        """Ends both directions, after the first keep_up and keep_down messages under way."""
        self.up = deque([*self.up][:keep_up] + [None])
        self.down = deque([*self.down][:keep_down] + [None])
        self.is_cut, self.awake = True, False


class Socket:
    """One direction of a process's connection to its service: ordered, and possibly delayed.

    Messages on different sockets of one worker may overtake each other. In a world with quick
    sockets every message arrives at once.
    """

    def __init__(self, world: World) -> None:
        self._is_quick = world.has_quick_sockets
        self._queue: deque[Callable[[], None]] = deque()
        world.sockets.append(self)

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, deliver: Callable[[], None]) -> None:
        """Sends a message."""
        if self._is_quick:
            deliver()
        else:
            self._queue.append(deliver)

    def deliver(self) -> None:
        """Delivers the oldest message."""
        if self._queue:
            self._queue.popleft()()

    def close(self) -> None:
        """Drops all messages: the worker has died."""
        self._queue.clear()
