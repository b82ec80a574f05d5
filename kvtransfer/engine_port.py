"""An engine process's end of the control socket: plain blocking sockets with bounds, no asyncio."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError

from baton.kvtransfer import local_wire
from baton.kvtransfer.arena import Segment
from baton.kvtransfer.errors import ServiceGone, TransferError
from baton.kvtransfer.frames import FRAME_TARGET_BYTES, checksum
from baton.v1 import kv_transfer_pb2

# The epoch of a handoff's first frames, unless it was opened with another.
FIRST_EPOCH = 1
_RECEIVE_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class Claim:
    """Staging that one rank is about to load.

    Attributes:
        offset: of this rank's bytes in the segment; layer l, block b is at
            offset + (l * num_blocks + b) * block_bytes.
        frames: what was received: of a claim all, in layer order; of a peek those that are new. A
            loader verifies each frame's checksum over the bytes as they are after its copy, not
            before it: staging may expire under a slow copy.
    """

    offset: int
    num_blocks: int
    num_tokens: int
    epoch: int
    frames: tuple[kv_transfer_pb2.LocalFrame, ...]

    @classmethod
    def of(cls, claimed: kv_transfer_pb2.LocalClaimed) -> Claim:
        """As the contract has it."""
        return cls(
            claimed.offset,
            claimed.num_blocks,
            claimed.num_tokens,
            claimed.epoch,
            tuple(claimed.frames),
        )

    @classmethod
    def parse(cls, claimed: bytes) -> Claim:
        """A LocalClaimed as it was serialized, to pass from process to process."""
        return cls.of(kv_transfer_pb2.LocalClaimed.FromString(claimed))


def split_blocks(
    first_block: int, num_blocks: int, block_bytes: int, max_bytes: int = FRAME_TARGET_BYTES
) -> Iterator[tuple[int, int]]:
    """Cuts a run of blocks into runs (first_block, num_blocks) of a frame's size each."""
    step = max(1, max_bytes // block_bytes)
    for first in range(first_block, first_block + num_blocks, step):
        yield first, min(step, first_block + num_blocks - first)


def filled_frame(
    handoff_id: bytes,
    epoch: int,
    rank: int,
    layer: int,
    first_block: int,
    num_blocks: int,
    data: bytes | bytearray | memoryview,
    *,
    last: bool = False,
) -> kv_transfer_pb2.LocalFrame:
    """The notification that a run of blocks was written to staging.

    `data` is the num_blocks * block_bytes bytes, best as they were in the cache rather than as they
    are in staging: then no other writer of staging can go unnoticed. `last` says that nothing more
    follows from this rank; a frame of 0 blocks may say it alone.
    """
    return kv_transfer_pb2.LocalFrame(
        handoff_id=handoff_id,
        epoch=epoch,
        rank=rank,
        layer=layer,
        first_block=first_block,
        num_blocks=num_blocks,
        checksum=checksum(data),
        last=last,
    )


class EnginePort:
    """One engine process's connection to the transfer service beside it.

    Never raises into the engine's loop: once the service has ended `alive` is False and every call
    answers as if there were no handoffs (False, None, []). The mapped segment stays readable and
    writable until `close`. One thread uses it.

    Args:
        socket_path: of the service's control socket; everything else is asked for there.
        timeout_s: for connecting, and for the service to take what is written to it.

    Raises:
        ServiceGone: only from here: nobody listens on the socket, or no answer in time.
    """

    def __init__(self, socket_path: str, *, timeout_s: float = 5.0) -> None:
        self._timeout_s = timeout_s
        self._unpacker = local_wire.Unpacker()
        self._replies: dict[int, kv_transfer_pb2.LocalReply] = {}
        self._awaited = 0
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
        """False once the service is known to have ended; it does not come back."""
        return self._alive

    @property
    def description(self) -> kv_transfer_pb2.LocalConfigured:
        """The service's address, segment and arena sizes."""
        return self._description

    @property
    def memory(self) -> memoryview:
        """The whole segment, writable bytes: offsets of sends and claims index it.

        Release every slice of it (and every array over it) before `close`.
        """
        return self._segment.memory

    def prefault(self) -> None:
        """For whoever writes to the segment: the first writes cost no more than all others."""
        self._segment.prefault()

    def send_frames(self, frames: Iterable[kv_transfer_pb2.LocalFrame]) -> bool:
        """Says that these blocks of staging are filled; one write for all of them."""
        return self._send(
            kv_transfer_pb2.LocalRequest(frames=kv_transfer_pb2.LocalFrames(frames=frames))
        )

    def restart_send(self, handoff_id: bytes, epoch: int, *, timeout_s: float = 2.0) -> bool:
        """The prefill starts over under a higher epoch; everything sent so far is void.

        Each rank calls it before it writes the handoff's staging again: when it returns True,
        nothing reads the old bytes any more. False: the service has ended or does not answer; then
        nothing more of this handoff may be written.
        """
        restart = kv_transfer_pb2.LocalRestartSend(handoff_id=handoff_id, epoch=epoch)
        reply = self._call(kv_transfer_pb2.LocalRequest(restart_send=restart), timeout_s)
        return reply is not None and not reply.error

    def abort_send(self, handoff_id: bytes) -> bool:
        """The send is over without a commit. Unknown ids are ignored."""
        abort = kv_transfer_pb2.LocalAbortSend(handoff_id=handoff_id)
        return self._send(kv_transfer_pb2.LocalRequest(abort_send=abort))

    def subscribe(self) -> bool:
        """From now on `poll` returns changes of handoffs' states, beginning with those known."""
        subscribe = kv_transfer_pb2.LocalSubscribe()
        return self._send(kv_transfer_pb2.LocalRequest(subscribe=subscribe))

    def poll(self) -> list[kv_transfer_pb2.LocalHandoffState]:
        """Handoffs whose state changed since the last poll, the latest state of each; never waits.

        Empty also when the service has ended: look at `alive`.
        """
        self._receive()
        states = list(self._states.values())
        self._states.clear()
        return states

    def claim(self, handoff_id: bytes, rank: int, *, timeout_s: float = 2.0) -> Claim | None:
        """Takes committed staging to load it; None when it is not committed (any more).

        Each rank claims once. Whatever the answer, it is released, by `release`: the service may
        have given what nobody waited for any longer.

        Args:
            handoff_id: of 16 bytes.
            rank: whose part.
            timeout_s: for each answer; one lists so many frames at most.
        """
        frames: list[kv_transfer_pb2.LocalFrame] = []
        while True:
            claim = kv_transfer_pb2.LocalClaim(
                handoff_id=handoff_id, rank=rank, num_seen=len(frames)
            )
            reply = self._call(kv_transfer_pb2.LocalRequest(claim=claim), timeout_s)
            if reply is None or (claimed := _claim(reply)) is None:
                return None
            frames += claimed.frames
            if not claimed.frames or len(frames) >= reply.claimed.num_frames:
                return replace(claimed, frames=tuple(frames))

    def claim_ahead(self, handoff_id: bytes) -> bool:
        """Claims staging for every rank as soon as it is committed, also before the handoff comes.

        The state that says so has the claims. From then on it is held until it is released, for as
        long as a commit lasts. Said again when its load begins, it is held for as long as a load
        may take from there.
        """
        claim = kv_transfer_pb2.LocalClaim(handoff_id=handoff_id, ahead=True)
        return self._send(kv_transfer_pb2.LocalRequest(claim=claim))

    def peek(
        self, handoff_id: bytes, rank: int, epoch: int, num_seen: int, *, timeout_s: float = 2.0
    ) -> Claim | None:
        """What has come of a handoff; None when nothing can be read of it now.

        Of more than a message may list it is the beginning.

        Args:
            handoff_id: of 16 bytes.
            rank: whose part.
            epoch: of the frames seen before; 0 for none.
            num_seen: frames that are not wanted again, unless the epoch is another one.
            timeout_s: for the answer.
        """
        peek = kv_transfer_pb2.LocalPeek(
            handoff_id=handoff_id, rank=rank, epoch=epoch, num_seen=num_seen
        )
        reply = self._call(kv_transfer_pb2.LocalRequest(peek=peek), timeout_s)
        return None if reply is None else _claim(reply)

    def wait(self, timeout_s: float, beside: Sequence[socket.socket] = ()) -> None:
        """Until there is something to poll, or to read from another socket; at most so long."""
        if self._alive and not self._states:
            select.select([self._socket, *beside], [], [], timeout_s)

    def release(
        self,
        handoff_id: bytes,
        rank: int = 0,
        *,
        all_ranks: bool = False,
        not_loaded: kv_transfer_pb2.RefusalReason.ValueType = (
            kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
        ),
    ) -> bool:
        """Done with a handoff: loaded, or nothing to load. Idempotent; unknown ids are ignored.

        Args:
            handoff_id: of 16 bytes.
            rank: unless it is all of them.
            all_ranks: every rank's part.
            not_loaded: why nothing was loaded that should have been: the handoff fails for that.
        """
        release = kv_transfer_pb2.LocalRelease(
            handoff_id=handoff_id, rank=rank, all_ranks=all_ranks, not_loaded=not_loaded
        )
        return self._send(kv_transfer_pb2.LocalRequest(release=release))

    def close(self) -> None:
        """Closes the connection and unmaps the segment; idempotent."""
        self._alive = False
        self._socket.close()
        self._segment.close()

    def _call(
        self, request: kv_transfer_pb2.LocalRequest, timeout_s: float
    ) -> kv_transfer_pb2.LocalReply | None:
        self._call_id += 1
        self._awaited = request.call_id = self._call_id
        deadline = time.monotonic() + timeout_s
        try:
            if not self._send(request):
                return None
            while (reply := self._replies.pop(request.call_id, None)) is None:
                remaining = deadline - time.monotonic()
                if not self._alive or remaining <= 0:
                    return None
                select.select([self._socket], [], [], remaining)
                self._receive()
            return reply
        finally:
            self._awaited = 0

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
                        # Half a message may be out: nothing can follow it on this connection.
                        self._alive = False
                        self._socket.close()
                        return False
                    select.select([], [self._socket], [], remaining)
        except OSError:
            # What it wrote before it ended can still be read, but nothing it holds is left.
            self._alive = False
        return self._alive

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
            # Again at the end: in the order of the latest changes.
            self._states.pop(state.handoff_id, None)
            self._states[state.handoff_id] = state
        elif reply.call_id == self._awaited != 0:
            self._replies[reply.call_id] = reply


def _claim(reply: kv_transfer_pb2.LocalReply) -> Claim | None:
    return Claim.of(reply.claimed) if reply.HasField("claimed") else None
