"""Staging memory: one shared segment, and the extents of an arena inside it.

A segment is a file in /dev/shm. The transfer service creates it, and the engine's processes map it
by name. The service holds an flock on the file as long as it lives. A segment without an flock is
left over from a killed service; the next service that starts on this machine removes it.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from baton.kvtransfer.errors import NoRoom, TransferError

SEGMENT_DIRECTORY = Path("/dev/shm")
SEGMENT_PREFIX = "baton-kv-"
# Constant of Linux's mman.h, which Python's mmap does not define.
MADV_POPULATE_WRITE = 23
# Alignment of extents in bytes: a multiple of a cache line.
ALIGN_BYTES = 256


class Segment:
    """A mapped shared-memory segment.

    Attributes:
        name: Name of the file in SEGMENT_DIRECTORY.
        memory: The whole segment.
    """

    def __init__(self, name: str, file: int, *, owner: bool) -> None:
        """Maps a file and takes over its descriptor. Callers use `create` and `open`."""
        self.name = name
        self._file: int | None = file
        self._owner = owner
        self._map = mmap.mmap(file, os.fstat(file).st_size)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Creates a segment that only this user can open; removes segments of killed services.

        Raises:
            TransferError: Shared memory is missing or too small.
        """
        remove_leftovers()
        try:
            if size_bytes > free_shared_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while True:
                name = f"{SEGMENT_PREFIX}{secrets.token_hex(8)}"
                path = SEGMENT_DIRECTORY / name
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another service may have removed the file before it was locked.
                if path.exists():
                    break
                os.close(file)
            try:
                # Allocated now: if the file system filled up later, a process that touches a
                # missing page would be killed, and the first handoffs would wait for the kernel.
                os.posix_fallocate(file, 0, size_bytes)
                return cls(name, file, owner=True)
            except OSError:
                path.unlink(missing_ok=True)
                os.close(file)
                raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise TransferError(
                    f"kv_transfer.send_bytes + .receive_bytes is {size_bytes}; "
                    f"{SEGMENT_DIRECTORY} has {free_shared_bytes()} bytes free"
                ) from error
            raise TransferError(f"no shared memory in {SEGMENT_DIRECTORY}: {error}") from error

    @classmethod
    def open(cls, name: str) -> Segment:
        """Maps the segment of a running service.

        Raises:
            TransferError: The segment does not exist or cannot be mapped.
        """
        try:
            file = os.open(segment_path(name), os.O_RDWR)
            try:
                return cls(name, file, owner=False)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            raise TransferError(f"segment {name}: {error}") from error

    def prefault(self) -> None:
        """Maps every page into this process now.

        The first write to a page is slow; without this call the first handoffs would be slow.
        """
        # Linux before 5.14 refuses the call; pages are then mapped at the first write.
        with contextlib.suppress(OSError):
            self._map.madvise(MADV_POPULATE_WRITE)

    def close(self) -> bool:
        """Unmaps the segment, and removes it if this process created it. Idempotent.

        Returns:
            Whether the segment is unmapped. If slices of it exist, the last one unmaps it.
        """
        if self._file is None:
            return self._map.closed
        if self._owner:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SEGMENT_DIRECTORY / self.name)
        os.close(self._file)
        self._file = None
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()
        return self._map.closed


def segment_path(name: str) -> Path:
    """Returns the file of a segment. Raises TransferError for a name that no segment has."""
    if not name.startswith(SEGMENT_PREFIX) or "/" in name:
        raise TransferError(f"segment name is {name!r}; must begin with {SEGMENT_PREFIX!r}")
    return SEGMENT_DIRECTORY / name


def free_shared_bytes() -> int:
    """Returns the free bytes for further segments."""
    stat = os.statvfs(SEGMENT_DIRECTORY)
    return stat.f_bavail * stat.f_frsize


def remove_leftovers() -> list[str]:
    """Removes this user's segments whose service has ended; returns their names."""
    removed = []
    for path in SEGMENT_DIRECTORY.glob(f"{SEGMENT_PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            file = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                removed.append(path.name)
            finally:
                os.close(file)
    return removed


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes of a segment that one owner has reserved.

    Attributes:
        offset: Offset in the segment, in bytes.
        size_bytes: Requested size; the reserved size is rounded up to ALIGN_BYTES.
    """

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Usage of an arena in bytes, alignment included."""

    total_bytes: int
    used_bytes: int
    num_extents: int


def aligned(size_bytes: int) -> int:
    """Returns the reserved size of an extent of this size, in bytes."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Arena:
    """Extents of [begin, begin + size) of a segment: first fit, neighbours coalesce when freed."""

    def __init__(self, begin: int, size_bytes: int) -> None:
        self._begin = begin
        self._size = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        # Offsets and sizes of the free runs, sorted by offset; two runs are never adjacent.
        self._free_offsets = [begin] if self._size else []
        self._free_sizes = [self._size] if self._size else []
        self._used: dict[int, Extent] = {}
        self._used_bytes = 0

    def fits_ever(self, size_bytes: int) -> bool:
        """Returns whether an empty arena has room for this size."""
        return aligned(size_bytes) <= self._size

    def allocate(self, size_bytes: int) -> Extent:
        """Reserves an extent of at least one byte.

        Raises:
            NoRoom: No free run is large enough now.
        """
        assert size_bytes > 0
        wanted = aligned(size_bytes)
        for index, (offset, size) in enumerate(
            zip(self._free_offsets, self._free_sizes, strict=True)
        ):
            if size < wanted:
                continue
            if size == wanted:
                del self._free_offsets[index], self._free_sizes[index]
            else:
                self._free_offsets[index] += wanted
                self._free_sizes[index] -= wanted
            extent = Extent(offset, size_bytes)
            self._used[offset] = extent
            self._used_bytes += wanted
            return extent
        raise NoRoom(f"no {wanted} bytes in one run; {self._size - self._used_bytes} are free")

    def free(self, extent: Extent) -> None:
        """Frees an extent; must be called exactly once for each extent."""
        if self._used.pop(extent.offset, None) is not extent:
            raise ValueError(f"{extent} is not reserved")
        size = aligned(extent.size_bytes)
        self._used_bytes -= size
        offsets, sizes = self._free_offsets, self._free_sizes
        index = bisect.bisect(offsets, extent.offset)
        offsets.insert(index, extent.offset)
        sizes.insert(index, size)
        if index + 1 < len(offsets) and offsets[index] + sizes[index] == offsets[index + 1]:
            sizes[index] += sizes[index + 1]
            del offsets[index + 1], sizes[index + 1]
        if index > 0 and offsets[index - 1] + sizes[index - 1] == offsets[index]:
            sizes[index - 1] += sizes[index]
            del offsets[index], sizes[index]

    @property
    def bounds(self) -> tuple[int, int]:
        """Begin and end of the arena in its segment, in bytes."""
        return self._begin, self._begin + self._size

    def within(self, begin: int, end: int) -> tuple[list[tuple[int, int]], list[Extent]]:
        """Returns the free parts of a range, as (begin, end), and the extents that overlap it."""
        free = [
            (max(begin, offset), min(end, offset + size))
            for offset, size in zip(self._free_offsets, self._free_sizes, strict=True)
            if offset < end and begin < offset + size
        ]
        used = [
            extent
            for extent in self._used.values()
            if extent.offset < end and begin < extent.offset + aligned(extent.size_bytes)
        ]
        return free, used

    def statistics(self) -> ArenaStatistics:
        """Returns the usage of the arena."""
        return ArenaStatistics(self._size, self._used_bytes, len(self._used))

    def check_integrity(self) -> None:
        """Raises AssertionError unless used and free runs tile the arena exactly."""
        runs = [(extent.offset, aligned(extent.size_bytes), 1) for extent in self._used.values()]
        runs += [
            (offset, size, 0)
            for offset, size in zip(self._free_offsets, self._free_sizes, strict=True)
        ]
        position, was_free = self._begin, False
        for offset, size, used in sorted(runs):
            assert offset == position, f"gap or overlap at {position}: next run is at {offset}"
            assert size > 0, f"empty run at {offset}"
            assert used or not was_free, f"free runs not coalesced at {offset}"
            position, was_free = offset + size, not used
        assert position == self._begin + self._size, f"ends at {position}"
        used_bytes = sum(size for _, size, used in runs if used)
        assert used_bytes == self._used_bytes, f"{used_bytes} used, {self._used_bytes} counted"
