"""One worker's attach stream: numbering, acknowledgement and replay, across reconnects."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.coordinator.events import Command
from baton.coordinator.request import WorkerKey
from baton.runtime.errors import BatonError
from baton.v1 import cluster_pb2, common_pb2

_MAX_KEPT_MESSAGES = 8192
_MAX_KEPT_BYTES = 64 * 2**20
# Received without an answer, before one is sent only to acknowledge.
_ACK_EVERY = 64
# Of a CoordinatorMessage, by what it carries.
_FIELDS: dict[type[Command], str] = {
    cluster_pb2.PrefillCommand: "prefill",
    cluster_pb2.DecodeCommand: "decode",
    cluster_pb2.ExpectCommand: "expect",
    cluster_pb2.CancelCommand: "cancel",
    cluster_pb2.SetRoleCommand: "set_role",
    cluster_pb2.DrainCommand: "drain",
    cluster_pb2.ReleaseCommand: "release",
    cluster_pb2.RolloutRecord: "rollout",
}


class WorkerLink:
    """What was said to one worker incarnation and not acknowledged, and what was heard.

    It outlives the streams it runs over: a stream that ends and comes back within this incarnation
    and coordinator loses nothing.

    Attributes:
        role: that the worker is to serve.
        adopted: what it goes on with, by its last Hello.
        received: highest sequence number processed.
        stream: the stream it runs over now; a newer one takes over from an older.
        wake: set when the writer has something to do.
        error: what ends the stream, once `ended`.
    """

    def __init__(self, key: WorkerKey) -> None:
        self.key = key
        self.role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED
        self.adopted: tuple[cluster_pb2.AdoptedRequest, ...] = ()
        self.received = 0
        self.stream: object | None = None
        self.wake = asyncio.Event()
        self.ended = False
        self.error: BatonError | None = None
        self._acknowledged = 0
        self._kept: deque[tuple[cluster_pb2.CoordinatorMessage, int]] = deque()
        self._num_bytes = 0
        self._first_seq = self._next_to_send = self._next_seq = 1

    def open(self, stream: object, ack: int) -> None:
        """A stream begins; sending goes on after what the worker has processed."""
        self.stream = stream
        self.acknowledge(ack)
        self._next_to_send = self._first_seq
        self._acknowledged = self.received
        self.wake.set()

    def end(self, error: BatonError | None) -> None:
        """The worker is out of the cluster; None lets it end the stream itself."""
        self.error = error
        self.ended = error is not None
        self._kept.clear()
        self._first_seq = self._next_to_send = self._next_seq
        self._num_bytes = 0
        self.wake.set()

    def leave(self) -> None:
        """Ends the stream and nothing else: the worker looks for the next coordinator."""
        self.stream = None
        self.wake.set()

    def send(self, command: Command) -> bool:
        """Keeps a command until it is acknowledged.

        Returns:
            False when more is kept than may be: the worker does not keep up.
        """
        message = cluster_pb2.CoordinatorMessage(seq=self._next_seq)
        getattr(message, _FIELDS[type(command)]).CopyFrom(command)
        self._next_seq += 1
        num_bytes = message.ByteSize()
        self._kept.append((message, num_bytes))
        self._num_bytes += num_bytes
        self.wake.set()
        return len(self._kept) <= _MAX_KEPT_MESSAGES and self._num_bytes <= _MAX_KEPT_BYTES

    def acknowledge(self, seq: int) -> None:
        """The worker has processed all up to `seq`."""
        while self._kept and self._first_seq <= seq:
            self._num_bytes -= self._kept.popleft()[1]
            self._first_seq += 1
        self._next_to_send = max(self._next_to_send, self._first_seq)

    def next_to_send(self) -> cluster_pb2.CoordinatorMessage | None:
        """The next kept message of this stream, with the newest acknowledgement."""
        if self._next_to_send >= self._next_seq:
            return None
        message = self._kept[self._next_to_send - self._first_seq][0]
        self._next_to_send += 1
        message.ack = self._acknowledged = self.received
        return message

    def bare_acknowledgement(self) -> cluster_pb2.CoordinatorMessage:
        self._acknowledged = self.received
        return cluster_pb2.CoordinatorMessage(ack=self.received)

    def processed(self, seq: int) -> None:
        """The worker's message `seq` took effect."""
        self.received = seq
        if self.received - self._acknowledged >= _ACK_EVERY:
            self.wake.set()

    @property
    def owes_acknowledgement(self) -> bool:
        return self.received - self._acknowledged >= _ACK_EVERY
