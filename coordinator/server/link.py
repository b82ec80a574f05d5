"""State of one worker's attach stream across reconnects: numbering, acknowledgement, replay."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.coordinator.state.events import Command
from baton.coordinator.state.requests import WorkerKey
from baton.runtime.errors import BatonError, InvalidArgument
from baton.runtime.network.rpc import MAX_MESSAGE_BYTES
from baton.runtime.network.wire import field, length_tag, varint_tag
from baton.v1 import cluster_pb2, common_pb2

_MAX_KEPT_MESSAGES = 8192
_MAX_KEPT_BYTES = 64 * 2**20
# Number of received messages after which a bare acknowledgement is sent.
_ACK_EVERY = 64
# Size limit of the fields around a command in its message.
ENVELOPE_BYTES = 64
# Limits of one message with several commands; a longer command is sent alone.
MAX_BATCH_MESSAGES, _MAX_BATCH_BYTES = 256, 2**20

_MESSAGE = cluster_pb2.CoordinatorMessage.DESCRIPTOR
_SEQ, _ACK = varint_tag(_MESSAGE, "seq"), varint_tag(_MESSAGE, "ack")
_BATCH = length_tag(_MESSAGE, "batch")
# Field tags of CoordinatorMessage by command type.
_TAGS: dict[type[Command], int] = {
    cluster_pb2.PrefillCommand: length_tag(_MESSAGE, "prefill"),
    cluster_pb2.DecodeCommand: length_tag(_MESSAGE, "decode"),
    cluster_pb2.CancelCommand: length_tag(_MESSAGE, "cancel"),
    cluster_pb2.SetRoleCommand: length_tag(_MESSAGE, "set_role"),
    cluster_pb2.DrainCommand: length_tag(_MESSAGE, "drain"),
    cluster_pb2.ReleaseCommand: length_tag(_MESSAGE, "release"),
    cluster_pb2.ProfileCommand: length_tag(_MESSAGE, "profile"),
    cluster_pb2.RolloutRecord: length_tag(_MESSAGE, "rollout"),
    cluster_pb2.StepTargets: length_tag(_MESSAGE, "step_targets"),
    cluster_pb2.DropCacheCommand: length_tag(_MESSAGE, "drop_cache"),
}


def _encoded(command: Command) -> bytes:
    """Encodes a command as a field of CoordinatorMessage."""
    # Field numbers above 15 have tags of two bytes, which `field` cannot write.
    if isinstance(command, cluster_pb2.RenderCommand):
        return cluster_pb2.CoordinatorMessage(render=command).SerializeToString()
    if isinstance(command, cluster_pb2.SendPrefixCommand):
        return cluster_pb2.CoordinatorMessage(send_prefix=command).SerializeToString()
    body = command.SerializeToString()
    return field(_TAGS[type(command)], len(body)) + body


class WorkerLink:
    """Unacknowledged commands to one worker incarnation, and progress of its messages.

    Commands are encoded once, in `send`, and kept as bytes until they are acknowledged. A link
    lives longer than its streams, so a worker that reconnects to this coordinator loses nothing.

    Args:
        key: the worker incarnation.
        image_bytes: size of the images that its commands may carry, beside their other parts.
        max_command_bytes: size limit of one command; gRPC must carry it in both processes.

    Attributes:
        role: role that the worker must serve.
        adopted: requests that the worker continues, by its last Hello.
        received: highest sequence number processed.
        stream: present stream; a newer stream replaces an older one.
        wake: set when the writer has something to do.
        error: error that ends the stream once `ended` is true.
    """

    def __init__(
        self,
        key: WorkerKey,
        image_bytes: int = 0,
        max_command_bytes: int = MAX_MESSAGE_BYTES - ENVELOPE_BYTES,
    ) -> None:
        self.key = key
        self._max_command_bytes = max_command_bytes
        self._max_kept_bytes = max(_MAX_KEPT_BYTES, 4 * max_command_bytes) + image_bytes
        self.role: common_pb2.Role.ValueType = common_pb2.ROLE_UNSPECIFIED
        self.adopted: tuple[cluster_pb2.AdoptedRequest, ...] = ()
        self.received = 0
        self.stream: object | None = None
        self.wake = asyncio.Event()
        self.ended = False
        self.error: BatonError | None = None
        self._acknowledged = 0
        self._kept: deque[bytes] = deque()
        self._num_bytes = 0
        self._first_seq = self._next_to_send = self._next_seq = 1

    @property
    def is_used(self) -> bool:
        """Whether one end has processed a numbered message of the other."""
        return self.received > 0 or self._first_seq > 1

    def open(self, stream: object) -> None:
        """Starts a stream; sending continues after the last acknowledged command."""
        self.stream = stream
        self._next_to_send = self._first_seq
        self._acknowledged = self.received
        self.wake.set()

    def end(self, error: BatonError | None) -> None:
        """Records that the worker has left the cluster; None lets the worker end the stream."""
        self.error = error
        self.ended = error is not None
        self._kept.clear()
        self._first_seq = self._next_to_send = self._next_seq
        self._num_bytes = 0
        self.wake.set()

    def leave(self) -> None:
        """Ends only the stream, so that the worker looks for the next coordinator."""
        self.stream = None
        self.wake.set()

    def send(self, command: Command) -> bool:
        """Keeps a command until it is acknowledged.

        Returns:
            False if the kept commands exceed the limit because the worker does not acknowledge.

        Raises:
            InvalidArgument: The command is too large. It is not kept, because gRPC would end this
                stream and each later one.
        """
        encoded = _encoded(command)
        if len(encoded) > self._max_command_bytes:
            raise InvalidArgument(
                "request",
                f"{len(encoded)} bytes as a worker's command",
                f"must be at most {self._max_command_bytes} bytes",
            )
        message = field(_SEQ, self._next_seq) + encoded
        self._next_seq += 1
        self._kept.append(message)
        self._num_bytes += len(message)
        self.wake.set()
        return len(self._kept) <= _MAX_KEPT_MESSAGES and self._num_bytes <= self._max_kept_bytes

    def acknowledge(self, seq: int) -> None:
        """Drops all commands up to `seq`, which the worker has processed."""
        while self._kept and self._first_seq <= seq:
            self._num_bytes -= len(self._kept.popleft())
            self._first_seq += 1
        self._next_to_send = max(self._next_to_send, self._first_seq)

    def next_to_send(self) -> bytes | None:
        """Combines unsent commands into one message with the latest acknowledgement.

        Returns:
            An encoded CoordinatorMessage; None if no command waits.
        """
        first = self._next_to_send - self._first_seq
        num_unsent = self._next_seq - self._next_to_send
        if num_unsent <= 0:
            return None
        parts = [self._kept[first]]
        if num_unsent > 1:
            num_bytes = len(parts[0])
            for index in range(first + 1, first + min(num_unsent, MAX_BATCH_MESSAGES)):
                message = self._kept[index]
                num_bytes += len(message)
                if num_bytes > _MAX_BATCH_BYTES:
                    break
                parts.append(message)
        self._next_to_send += len(parts)
        if len(parts) > 1:
            parts = [part for one in parts for part in (field(_BATCH, len(one)), one)]
        return b"".join([self.bare_acknowledgement(), *parts])

    def bare_acknowledgement(self) -> bytes:
        """An encoded CoordinatorMessage with only an acknowledgement."""
        self._acknowledged = self.received
        return field(_ACK, self.received)

    def processed(self, seq: int) -> None:
        """Records that the worker's message `seq` was processed."""
        self.received = seq
        if self.received - self._acknowledged >= _ACK_EVERY:
            self.wake.set()

    @property
    def owes_acknowledgement(self) -> bool:
        return self.received - self._acknowledged >= _ACK_EVERY
