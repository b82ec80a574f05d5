"""The carriers of messages in the simulated network: pushes, links and workers' sockets."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton.kvtransfer.sending import Outgoing
from baton.v1 import kv_transfer_pb2 as pb

if TYPE_CHECKING:
    from simulated_decode import Decode
    from simulated_network import World
    from simulated_prefill import Prefill, Send


@functools.lru_cache(1024)
def truth(handoff_id: bytes, num_bytes: int) -> bytes:
    """Returns the KV cache of a handoff's prompt."""
    return random.Random(handoff_id.hex()).randbytes(num_bytes)


def joined(batch: Sequence[Outgoing] | bytes) -> bytes:
    """Returns a batch as bytes, with the current contents of staging."""
    if isinstance(batch, bytes):
        return batch
    return b"".join(part for out in batch for part in (out.header, out.payload))


class Stream:
    """One push. None in a queue is the end of that direction.

    Attributes:
        awake: Whether the sender may have a batch for it.
        is_cut: Whether messages that are written are lost.
        ending: Whether the receiver ignores messages that still arrive.
    """

    def __init__(self, number: int, send: Send) -> None:
        self.number, self.attempt = number, send
        self.source, self.target = send.source, send.target
        self.up: deque[bytes | None] = deque()
        self.down: deque[pb.PushReply | None] = deque()
        self.awake = True
        self.is_cut = self.ending = self.sender_over = self.receiver_over = False

    async def send(self, frames: Sequence[Outgoing]) -> None:
        """Puts a batch on its way; the payloads are read now."""
        if not self.is_cut:
            self.up.append(joined(frames))

    def cut(self, keep_up: int = 0, keep_down: int = 0) -> None:
        """Ends both directions, after the first keep_up and keep_down messages under way."""
        self.up = deque([*self.up][:keep_up] + [None])
        self.down = deque([*self.down][:keep_down] + [None])
        self.is_cut, self.awake = True, False


class Link:
    """One pair's link. Payloads are read from the sender's staging when they arrive."""

    def __init__(self, link_id: str, source: Prefill, target: Decode) -> None:
        self.link_id, self.source, self.target = link_id, source, target
        # A batch that a test has altered is bytes.
        self.queue: deque[Sequence[Outgoing] | bytes] = deque()
        # Workers that have not been told of the loss yet.
        self.untold: list[Prefill | Decode] = []
        self.is_lost = False

    def lose(self, keep: int = 0) -> None:
        if not self.is_lost:
            self.queue = deque([*self.queue][:keep])
            self.is_lost, self.untold = True, [self.source, self.target]


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
