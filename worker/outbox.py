"""Numbered queue of messages to the coordinator that are not acknowledged yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from itertools import islice

from baton.v1 import cluster_pb2

# Limits of one batch; a larger message is sent alone.
_MAX_BATCH_MESSAGES, _MAX_BATCH_BYTES = 64, 2**20


class Outbox:
    """Messages of one worker incarnation, numbered from 1 per coordinator generation.

    `post` never refuses a message, because the worker's requests bound their number. A producer
    without such a bound awaits `wait_for_space` between two posts.

    Args:
        max_messages: Number of kept messages, sent or not, at which `wait_for_space` blocks.
        max_bytes: Size of kept messages at which `wait_for_space` blocks.
    """

    def __init__(self, max_messages: int = 8192, max_bytes: int = 64 * 2**20) -> None:
        self._max_messages, self._max_bytes = max_messages, max_bytes
        self._kept: deque[tuple[cluster_pb2.WorkerMessage, int]] = deque()
        self._num_bytes = 0
        # Sequence numbers of the first kept message, of the next to send and of the next to post.
        self._first_seq = self._next_to_send = self._next_seq = 1
        self._reported_seq = 1
        self._has_space = asyncio.Event()
        self._has_space.set()
        self.posted = asyncio.Event()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def has_unsent(self) -> bool:
        return self._next_to_send < self._next_seq

    @property
    def next_seq(self) -> int:
        """Sequence number of the message that is posted next."""
        return self._next_seq

    def is_kept(self, seq: int) -> bool:
        """Whether message `seq` has been posted and is not acknowledged."""
        return self._first_seq <= seq < self._next_seq

    def post(self, message: cluster_pb2.WorkerMessage) -> None:
        """Keeps a message until it is acknowledged."""
        message.seq = self._next_seq
        self._next_seq += 1
        # The size is taken now, because sending sets `ack`, which changes it.
        num_bytes = message.ByteSize()
        self._kept.append((message, num_bytes))
        self._count(num_bytes)
        self.posted.set()

    def next_unsent(self) -> cluster_pb2.WorkerMessage | None:
        """Next message to send on this stream; it then counts as sent."""
        if not self.has_unsent:
            return None
        message = self._kept[self._next_to_send - self._first_seq][0]
        self._next_to_send += 1
        return message

    def next_batch(self) -> cluster_pb2.WorkerMessage | None:
        """Next message to send, or several as one batch; they then count as sent."""
        if self._next_seq - self._next_to_send <= 1:
            return self.next_unsent()
        index = self._next_to_send - self._first_seq
        found, num_bytes = list[cluster_pb2.WorkerMessage](), 0
        for message, size in islice(self._kept, index, index + _MAX_BATCH_MESSAGES):
            num_bytes += size
            if found and num_bytes > _MAX_BATCH_BYTES:
                break
            found.append(message)
        self._next_to_send += len(found)
        return cluster_pb2.WorkerMessage(batch=found) if len(found) > 1 else found[0]

    def acknowledge(self, seq: int) -> None:
        """Drops all messages up to `seq`; an older acknowledgement has no effect."""
        while self._kept and self._first_seq <= min(seq, self._next_seq - 1):
            self._first_seq += 1
            self._count(-self._kept.popleft()[1])
        self._next_to_send = max(self._next_to_send, self._first_seq)

    def mark_hello(self) -> None:
        """Marks all messages so far as covered by the Hello that has just been made."""
        self._reported_seq = self._next_seq

    def resume(self, ack: int) -> None:
        """Continues on a new stream to the same coordinator, after what it has processed."""
        self.acknowledge(ack)
        self._next_to_send = self._first_seq

    def restart(self, adopted: Collection[tuple[str, int]]) -> bool:
        """Starts again for a new coordinator: messages after the Hello are numbered from 1.

        Args:
            adopted: (request id, attempt). Outputs of other attempts are dropped, because the new
                coordinator counts attempts anew and would take them for its own.

        Returns:
            Whether messages from before the Hello were dropped.
        """
        has_dropped = self._first_seq < self._reported_seq
        later = list(islice(self._kept, max(0, self._reported_seq - self._first_seq), None))
        self._kept.clear()
        self._count(-self._num_bytes)
        self._first_seq = self._next_to_send = self._next_seq = 1
        for message, _ in later:
            if message.HasField("step"):
                # The handles belong to the old coordinator; the new one uses them for others.
                message.step.ClearField("tokens")
                outputs = message.step.outputs
                for index in reversed(range(len(outputs))):
                    if (outputs[index].request_id, outputs[index].attempt) not in adopted:
                        del outputs[index]
            self.post(message)
        return has_dropped

    async def wait_for_space(self) -> None:
        """Waits while too many messages are kept."""
        await self._has_space.wait()

    def _count(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if len(self._kept) < self._max_messages and self._num_bytes < self._max_bytes:
            self._has_space.set()
        else:
            self._has_space.clear()
