"""An engine process's end of the control socket: blocking sockets with timeouts, no asyncio."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from baton.kvtransfer import local_wire
from baton.kvtransfer.arena import Segment
from baton.kvtransfer.errors import ServiceGone, TransferError
from baton.kvtransfer.frames import FRAME_TARGET_BYTES, checksum
from baton.v1 import kv_transfer_pb2

_RECEIVE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Claim:
    """Staging of one of the sender's shards, which this rank is about to load.

    Attributes:
        offset: Where the shard's bytes begin in the segment; KvLayout.offset of shard 0 in the
            sender's layout says where a block lies after it.
        frames: All received frames of the shard, in layer order. The loader must verify each
            frame's checksum after its copy, not before, because staging may expire during a slow
            copy.
    """

    offset: int
    num_blocks: int
    num_tokens: int
    frames: tuple[kv_transfer_pb2.LocalFrame, ...]

    @classmethod
    def of(cls, claimed: kv_transfer_pb2.LocalClaimed) -> Claim:
        """Converts the contract's message."""
        return cls(
            claimed.offset,
            claimed.num_blocks,
            claimed.num_tokens,
            tuple(claimed.frames),
        )


def split_blocks(
    first_block: int, num_blocks: int, block_bytes: int, max_bytes: int = FRAME_TARGET_BYTES
) -> Iterator[tuple[int, int]]:
    """Cuts a run of blocks into runs (first_block, num_blocks) of at most max_bytes each."""
    step = max(1, max_bytes // block_bytes)
    for first in range(first_block, first_block + num_blocks, step):
        yield first, min(step, first_block + num_blocks - first)


def filled_frame(
    handoff_id: bytes,
    shard: int,
    layer: int,
    first_block: int,
    num_blocks: int,
    data: bytes | bytearray | memoryview,
    *,
    last: bool = False,
    stage: int = 0,
) -> kv_transfer_pb2.LocalFrame:
    """Returns the notification that a run of blocks was written to staging.

    Args:
        handoff_id: 16 bytes.
        shard: Shard that the writer fills.
        layer: Layer of the blocks.
        first_block: Index of the first block in the handoff.
        num_blocks: Number of blocks; 0 for a notification that only carries `last`.
        data: The num_blocks * block_bytes bytes. Pass the bytes of the cache rather than those in
            staging, so that the checksum detects any other writer of staging.
        last: Whether nothing more follows from this writer, the rank that fills the stage's layers
            of the shard.
        stage: Pipeline stage of the writer.
    """
    return kv_transfer_pb2.LocalFrame(
        handoff_id=handoff_id,
        shard=shard,
        layer=layer,
        first_block=first_block,
        num_blocks=num_blocks,
        checksum=checksum(data),
        last=last,
        stage=stage,
    )


class EnginePort:
    """One engine process's connection to the transfer service beside it.

    No method raises into the engine's loop: once the service has ended, `alive` is False and every
    call returns its empty value (False, None, []). The mapped segment stays readable and writable
    until `close`. Only one thread may use a port.

    Args:
        socket_path: Path of the service's control socket.
        timeout_s: Longest time to connect, and to write one request, in seconds.

    Raises:
        ServiceGone: The service does not listen on the socket, or does not answer in time. Only
            the constructor raises.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._unpacker = local_wire.Unpacker()
        # Replies to calls that wait for them, by call ID.
        self._replies: dict[int, kv_transfer_pb2.LocalReply] = {}
        self._awaited: set[int] = set()
        self._call_id = 0
        # The latest state of each handoff since the last poll.
        self._states: dict[bytes, kv_transfer_pb2.LocalHandoffState] = {}
        self._alive = True
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(socket_path)
            self._socket.setblocking(False)
            reply = self._call(
                kv_transfer_pb2.LocalRequest(describe=kv_transfer_pb2.LocalDescribe()), timeout_s
            )
            if reply is None:
                raise ServiceGone(f"transfer service at {socket_path} does not answer")
            self._description = reply.configured
            self._segment = Segment.open(reply.configured.shm_name)
        except (OSError, TransferError) as error:
            self._socket.close()
            if isinstance(error, ServiceGone):
                raise
            raise ServiceGone(f"transfer service at {socket_path}: {error}") from error

    @property
    def alive(self) -> bool:
        """Whether the service lives, as far as known; once False it stays False."""
        return self._alive

    @property
    def description(self) -> kv_transfer_pb2.LocalConfigured:
        """The service's address, segment and arena sizes."""
        return self._description

    @property
    def memory(self) -> memoryview:
        """The whole segment as writable bytes; offsets of sends and claims index it.

        Release every slice of it, and every array over it, before `close`.
        """
        return self._segment.memory

    def prefault(self) -> None:
        """Maps all pages of the segment, so that the first writes are as fast as later ones."""
        self._segment.prefault()

    def send_frames(self, frames: Iterable[kv_transfer_pb2.LocalFrame]) -> bool:
        """Reports blocks of staging as filled, all in one write to the socket."""
        return self._send(
            kv_transfer_pb2.LocalRequest(frames=kv_transfer_pb2.LocalFrames(frames=frames))
        )

    def abort_send(self, handoff_id: bytes) -> bool:
        """Ends a send without a commit. Unknown IDs are ignored."""
        abort = kv_transfer_pb2.LocalAbortSend(handoff_id=handoff_id)
        return self._send(kv_transfer_pb2.LocalRequest(abort_send=abort))

    def subscribe(self) -> bool:
        """Makes `poll` return states of handoffs, first the current ones and then each change."""
        subscribe = kv_transfer_pb2.LocalSubscribe()
        return self._send(kv_transfer_pb2.LocalRequest(subscribe=subscribe))

    def poll(self) -> list[kv_transfer_pb2.LocalHandoffState]:
        """Returns the latest state of each handoff that changed since the last poll; never waits.

        The list is also empty when the service has ended: see `alive`.
        """
        self._receive()
        states = list(self._states.values())
        self._states.clear()
        return states

    def claim(self, handoff_id: bytes, shard: int, *, timeout_s: float = 2.0) -> Claim | None:
        """Claims committed staging to load it; None when it is not committed (any more).

        A rank claims each shard once, and must call `release` after it even when the result is
        None: the service may have granted the claim after the timeout.

        Args:
            handoff_id: 16 bytes.
            shard: Index of one of the sender's shards.
            timeout_s: Longest wait for the answer, in seconds.
        """
        pending = self.begin_claim(handoff_id, shard)
        pending.wait(timeout_s)
        pending.give_up()
        return pending.claim

    def begin_claim(self, handoff_id: bytes, shard: int) -> PendingClaim:
        """Begins to claim committed staging; see `claim`.

        The caller must wait until it is over, or give it up.
        """
        return PendingClaim(self, handoff_id, shard)

    def release(
        self,
        handoff_id: bytes,
        shard: int = 0,
        *,
        all_shards: bool = False,
        not_loaded: kv_transfer_pb2.RefusalReason.ValueType = (
            kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
        ),
    ) -> bool:
        """Releases a handoff: it is loaded, or not needed. Idempotent; unknown IDs are ignored.

        Args:
            handoff_id: 16 bytes.
            shard: Index of one of the sender's shards; not used with all_shards.
            all_shards: Whether to release all shards.
            not_loaded: Why the handoff was not loaded although it should have been; fails it.
        """
        release = kv_transfer_pb2.LocalRelease(
            handoff_id=handoff_id, shard=shard, all_shards=all_shards, not_loaded=not_loaded
        )
        return self._send(kv_transfer_pb2.LocalRequest(release=release))

    def close(self) -> None:
        """Closes the connection and unmaps the segment. Idempotent."""
        self._alive = False
        self._socket.close()
        self._segment.close()

    def _call(
        self, request: kv_transfer_pb2.LocalRequest, timeout_s: float
    ) -> kv_transfer_pb2.LocalReply | None:
        call_id = self._begin(request)
        try:
            return self._reply(call_id, timeout_s)
        finally:
            self._forget(call_id)

    def _begin(self, request: kv_transfer_pb2.LocalRequest) -> int:
        """Sends a request that has a reply; returns the call's ID, which must be forgotten."""
        self._call_id += 1
        request.call_id = self._call_id
        self._awaited.add(request.call_id)
        self._send(request)
        return request.call_id

    def _reply(self, call_id: int, timeout_s: float) -> kv_transfer_pb2.LocalReply | None:
        """Waits for a call's reply; None: it has not come in time, or the service has ended."""
        deadline = time.monotonic() + timeout_s
        self._receive()
        while (reply := self._replies.pop(call_id, None)) is None:
            remaining = deadline - time.monotonic()
            if not self._alive or remaining <= 0:
                return None
            self._wait(select.POLLIN, remaining)
            self._receive()
        return reply

    def _forget(self, call_id: int) -> None:
        self._awaited.discard(call_id)
        self._replies.pop(call_id, None)

    def _send(self, request: kv_transfer_pb2.LocalRequest) -> bool:
        if not self._alive:
            return False
        data = memoryview(local_wire.encode(request))
        deadline = time.monotonic() + self._timeout_s
        try:
            while data:
                try:
                    data = data[self._socket.send(data) :]
                except BlockingIOError:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        # Part of the message may have left, so the connection is unusable.
                        self._alive = False
                        self._socket.close()
                        return False
                    self._wait(select.POLLOUT, remaining)
        except OSError:
            # The service has ended, and its handoffs are lost: unread messages do not matter.
            self._alive = False
        return self._alive

    def _wait(self, event: int, timeout_s: float) -> None:
        """Waits until the socket can be read (POLLIN) or written (POLLOUT), or has failed.

        select.select would raise an error for a descriptor above 1023.
        """
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll(timeout_s * 1000)

    def _receive(self) -> None:
        while self._alive:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            try:
                if not data:
                    raise ServiceGone("the control socket was closed")
                for message in self._unpacker.feed(data):
                    self._take(kv_transfer_pb2.LocalReply.FromString(message))
            except (TransferError, DecodeError):
                self._alive = False

    def _take(self, reply: kv_transfer_pb2.LocalReply) -> None:
        if reply.HasField("handoff"):
            state = reply.handoff
            # Moved to the end: states are returned in the order of their latest changes.
            self._states.pop(state.handoff_id, None)
            self._states[state.handoff_id] = state
        elif reply.call_id in self._awaited:
            self._replies[reply.call_id] = reply


class PendingClaim:
    """A claim whose answer may still be on its way; EnginePort.begin_claim makes it.

    Only the port's thread may use it.

    Attributes:
        claim: The claimed staging; None while there is no answer, and after a refusal.
        is_over: Whether the claim is answered, or never will be.
    """

    def __init__(self, port: EnginePort, handoff_id: bytes, shard: int) -> None:
        self._port, self._handoff_id, self._shard = port, handoff_id, shard
        self._frames: list[kv_transfer_pb2.LocalFrame] = []
        self.claim: Claim | None = None
        self.is_over = False
        self._call_id = self._ask()

    def wait(self, timeout_s: float) -> bool:
        """Waits until the claim is over, at most this long in seconds; returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over:
            reply = self._port._reply(self._call_id, max(0.0, deadline - time.monotonic()))
            if reply is None:
                if self._port.alive:
                    return False
            elif (claimed := _claim(reply)) is not None:
                self._frames += claimed.frames
                if claimed.frames and len(self._frames) < reply.claimed.num_frames:
                    # A reply lists at most MAX_LISTED_FRAMES.
                    self._port._forget(self._call_id)
                    self._call_id = self._ask()
                    continue
                self.claim = replace(claimed, frames=tuple(self._frames))
            self.give_up()
        return True

    def give_up(self) -> None:
        """Waits for no reply any more. Idempotent."""
        self._port._forget(self._call_id)
        self.is_over = True

    def _ask(self) -> int:
        claim = kv_transfer_pb2.LocalClaim(
            handoff_id=self._handoff_id, shard=self._shard, num_seen=len(self._frames)
        )
        return self._port._begin(kv_transfer_pb2.LocalRequest(claim=claim))


def _claim(reply: kv_transfer_pb2.LocalReply) -> Claim | None:
    return Claim.of(reply.claimed) if reply.HasField("claimed") else None
