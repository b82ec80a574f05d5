"""Shared memory between two services of one host: the receiver copies from the sender's segment.

The push carries references: frames that say where in the sender's segment the blocks are. The
receiver maps the segment read-only, so it cannot change the sender's memory. A mapping outlives the
segment's file, so a sender that is killed during a copy takes no bytes away. Bytes that change
during a copy (the send was aborted, or the prompt is computed again) are found by their checksum.
"""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

from baton.kvtransfer.arena import SEGMENT_DIRECTORY, Segment
from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.sending import Outgoing, OutgoingBlocks
from baton.kvtransfer.transports.transport import ServiceContext, Transport
from baton.v1 import kv_transfer_pb2 as pb

# Seconds after which a segment is unmapped that no push refers to. Its owner may have died, and the
# memory is free only when no process maps it.
IDLE_TIMEOUT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def domain() -> str:
    """Names the shared memory that this process sees; equal names mean the same memory."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="utf-8").strip()
        mount = os.stat(SEGMENT_DIRECTORY).st_dev
    except OSError as error:
        raise TransferError(f"no shared memory: {error}") from None
    return f"{boot_id}/{mount}/{os.getuid()}"


@dataclass(slots=True)
class _Mapped:
    segment: Segment
    streams: set[int] = field(default_factory=set)
    idle_timer: asyncio.TimerHandle | None = None


class ShmTransport(Transport):
    """Sends references on the push; the receiver copies the blocks from the sender's segment."""

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        self._domain = domain()
        self._segments = PeerSegments()

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(
            name=self.name, shm_domain=self._domain, shm_segment=self._service.segment_name
        )

    def frame(self, blocks: OutgoingBlocks) -> Outgoing:
        return blocks.reference()

    def accept(self, stream: int, offer: pb.TransportOffer) -> None:
        if offer.shm_domain != self._domain:
            raise TransferError("sender and receiver do not share memory")
        self._segments.attach(stream, offer.shm_segment)

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        return self._segments.resolve(stream, frame, num_bytes)

    def end(self, stream: int) -> None:
        self._segments.detach(stream)

    async def close(self) -> None:
        self._segments.close()


class PeerSegments:
    """Maps other services' segments while pushes refer to them, and IDLE_TIMEOUT_S longer."""

    def __init__(self) -> None:
        self._mapped: dict[str, _Mapped] = {}
        self._names: dict[int, str] = {}

    def attach(self, stream: int, name: str) -> None:
        """Lets a push refer to a segment. Raises TransferError when mapping the segment fails."""
        mapped = self._mapped.get(name)
        if mapped is None:
            mapped = self._mapped[name] = _Mapped(Segment.open(name, read_only=True))
        if mapped.idle_timer is not None:
            mapped.idle_timer.cancel()
            mapped.idle_timer = None
        mapped.streams.add(stream)
        self._names[stream] = name

    def detach(self, stream: int) -> None:
        """Ends the push's use of its segment. Idempotent."""
        name = self._names.pop(stream, None)
        if name is None:
            return
        mapped = self._mapped[name]
        mapped.streams.discard(stream)
        if not mapped.streams:
            loop = asyncio.get_running_loop()
            mapped.idle_timer = loop.call_later(IDLE_TIMEOUT_S, self._unmap, name)

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        """Returns the data frame that a push's reference stands for.

        Raises:
            MalformedFrame: The push uses no segment, or the reference lies outside the segment.
        """
        name = self._names.get(stream)
        if name is None:
            raise MalformedFrame("a reference on a stream that has not chosen shared memory")
        return frame.referenced(self._mapped[name].segment.memory, num_bytes)

    def close(self) -> None:
        """Unmaps every segment."""
        self._names.clear()
        for name in list(self._mapped):
            self._unmap(name)

    def _unmap(self, name: str) -> None:
        mapped = self._mapped.pop(name)
        if mapped.idle_timer is not None:
            mapped.idle_timer.cancel()
        if not mapped.segment.close():
            # A frame of a broken push still refers to the segment, in a cycle with the error that
            # ended the push. An idle service would never collect that cycle.
            gc.collect()
