"""Shared memory between two services of one host: the receiver copies from the sender's segment.

The stream carries references: frames that say where in the sender's segment the blocks are. The
receiver maps the segment read-only, so it cannot change the sender's memory. A mapping outlives the
segment's file, so a sender that is killed during a copy takes no bytes away. Bytes that change
during a copy (the send was aborted, or the prompt is computed again) are found by their checksum,
which is computed after the copy.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
from collections import Counter, deque
from pathlib import Path

import xxhash

from baton.kvtransfer.arena import SEGMENT_DIRECTORY, segment_path
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.frames import COPY_BYTES
from baton.kvtransfer.transports.pull import Puller, PullTransport
from baton.kvtransfer.transports.transport import EndedPull, Pull, ServiceContext
from baton.v1 import kv_transfer_pb2 as pb

# Seconds after which a segment is unmapped that nothing refers to. Its owner may have died, and the
# memory is free only when no process maps it.
IDLE_TIMEOUT_S = 5.0
# Bytes that are copied before the event loop is told: each report costs two thread switches.
_REPORT_BYTES = 8 * 2**20
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Python's mmap does not tell where it maps, and copies of its memory keep the interpreter's lock.
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def domain() -> str:
    """Names the shared memory that this process sees; equal names mean the same memory."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="utf-8").strip()
        mount = os.stat(SEGMENT_DIRECTORY).st_dev
    except OSError as error:
        raise TransferError(f"no shared memory: {error}") from None
    return f"{boot_id}/{mount}/{os.getuid()}"


class PeerSegment:
    """Another service's segment, mapped read-only.

    Attributes:
        name: Name of the segment.
        address: Where it is mapped; 0 once it is closed.
        size_bytes: Size of the segment.
        memory: The segment, which may not be read once it is closed.

    Raises:
        TransferError: The segment does not exist or cannot be mapped.
    """

    def __init__(self, name: str) -> None:
        self.name, self.address = name, 0
        try:
            file = os.open(segment_path(name), os.O_RDONLY)
            try:
                self.size_bytes = os.fstat(file).st_size
                at = _LIBC.mmap(None, self.size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
                if at == _MAP_FAILED:
                    raise OSError(number := ctypes.get_errno(), os.strerror(number))
                self.address = at
                self.memory = memoryview((ctypes.c_char * self.size_bytes).from_address(at))
            finally:
                os.close(file)
        except OSError as error:
            raise TransferError(f"segment {name}: {error}") from None

    def close(self) -> None:
        """Unmaps the segment; no copy from it may be under way. Idempotent."""
        if self.address:
            _LIBC.munmap(self.address, self.size_bytes)
            self.address = 0


class ShmPuller(Puller[PeerSegment]):
    """Copies, one read after the other, without the interpreter's lock.

    Args:
        memory: This service's segment.
    """

    poll_s = 0.0

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._started: deque[tuple[PeerSegment, Pull]] = deque()

    def start(self, source: PeerSegment, pull: Pull) -> None:
        self._started.append((source, pull))

    def ended(self) -> list[EndedPull]:
        ended, room = list[EndedPull](), _REPORT_BYTES
        while self._started and room > 0:
            source, pull = self._started.popleft()
            ended.append(EndedPull(pull.serial, self._copy(source, pull)))
            room -= pull.num_bytes
        return ended

    def _copy(self, source: PeerSegment, pull: Pull) -> int:
        """Copies the bytes of a pull; returns the checksum of the source after the copy.

        If the source is right after the copy, the copy is right too: the source was written before
        it was announced, and any later write makes its checksum wrong. The source is in the core's
        cache then, the target is not.
        """
        digest = xxhash.xxh3_64()
        shift = self._address + pull.target - pull.source
        end = pull.source + pull.num_bytes
        for begin in range(pull.source, end, COPY_BYTES):
            until = min(begin + COPY_BYTES, end)
            ctypes.memmove(shift + begin, source.address + begin, until - begin)
            digest.update(source.memory[begin:until])
        return int(digest.intdigest())


class ShmTransport(PullTransport[PeerSegment]):
    """Sends references on the stream; the receiver copies the blocks from the sender's segment.

    Segments stay mapped while streams or pulls refer to them, and IDLE_TIMEOUT_S longer.
    """

    def __init__(self, name: str, service: ServiceContext) -> None:
        super().__init__(name, service)
        self._domain = domain()
        self._segments: dict[str, PeerSegment] = {}
        self._num_users: Counter[PeerSegment] = Counter()
        self._idle: dict[PeerSegment, asyncio.TimerHandle] = {}

    def offer(self, target: str) -> pb.TransportOffer:
        return pb.TransportOffer(
            name=self.name, shm_domain=self._domain, shm_segment=self._service.segment_name
        )

    def accept(self, stream: int, offer: pb.TransportOffer) -> int:
        self._check_thread()
        if offer.shm_domain != self._domain:
            raise TransferError("sender and receiver do not share memory")
        segment = self._segments.get(offer.shm_segment)
        if segment is None:
            segment = self._segments[offer.shm_segment] = PeerSegment(offer.shm_segment)
        self._sources[stream] = segment
        self._used(segment)
        return segment.size_bytes

    def pull(self, pull: Pull) -> None:
        self._used(self._sources[pull.stream])
        super().pull(pull)

    async def close(self) -> None:
        await super().close()
        for timer in self._idle.values():
            timer.cancel()

    def _puller(self) -> ShmPuller:
        return ShmPuller(self._service.memory)

    def _used(self, segment: PeerSegment) -> None:
        self._num_users[segment] += 1
        if (timer := self._idle.pop(segment, None)) is not None:
            timer.cancel()

    def _released(self, segment: PeerSegment) -> None:
        self._num_users[segment] -= 1
        if not self._num_users[segment]:
            del self._num_users[segment]
            loop = asyncio.get_running_loop()
            self._idle[segment] = loop.call_later(IDLE_TIMEOUT_S, self._unmap, segment)

    def _unmap(self, segment: PeerSegment) -> None:
        del self._idle[segment], self._segments[segment.name]
        segment.close()
