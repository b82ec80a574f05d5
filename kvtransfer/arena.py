"""Staging memory: one shared segment, and the extents of an arena inside it.

A segment is a file in /dev/shm, created by the transfer service and mapped by name by the engine's
processes. The service holds an flock on it as long as it lives: a segment without one is a leftover
of a service that was killed, and the next service to start on this machine removes it.
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
# Of Linux's mman.h; Python's mmap does not name it.
MADV_POPULATE_WRITE = 23
# Of every extent: a cache line's multiple.
ALIGN_BYTES = 256


class Segment:
    """A mapped shared-memory segment.

    Attributes:
        name: of the file in SEGMENT_DIRECTORY.
        memory: all of it, as writable bytes unless it was opened read-only.
    """

    def __init__(self, name: str, file: int, *, owner: bool, read_only: bool = False) -> None:
        """Takes over the file descriptor once it is mapped; use `create` and `open`."""
        self.name = name
        self._file: int | None = file
        self._owner = owner
        access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
        self._map = mmap.mmap(file, os.fstat(file).st_size, access=access)
        self.memory = memoryview(self._map)

    @classmethod
    def create(cls, size_bytes: int) -> Segment:
        """Makes a segment that only this user can open; removes leftovers of killed services.

        Raises:
            TransferError: not enough shared memory, or none at all.
        """
        remove_leftovers()
        try:
            if size_bytes > _free_bytes():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            while True:
                name = f"{SEGMENT_PREFIX}{secrets.token_hex(8)}"
                path = SEGMENT_DIRECTORY / name
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                fcntl.flock(file, fcntl.LOCK_EX)
                # Another service may have taken it for a leftover before it was locked.
                if path.exists():
                    break
                os.close(file)
            try:
                # All of it now: a file system that fills up later would kill whoever touches the
                # rest, and the first handoffs would wait for the kernel to find and clear pages.
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
                    f"{SEGMENT_DIRECTORY} has {_free_bytes()} bytes free"
                ) from error
            raise TransferError(f"no shared memory in {SEGMENT_DIRECTORY}: {error}") from error

    @classmethod
    def open(cls, name: str, *, read_only: bool = False) -> Segment:
        """Maps the segment of a running service.

        Raises:
            TransferError: no such segment, or it cannot be mapped.
        """
        if not name.startswith(SEGMENT_PREFIX) or "/" in name:
            raise TransferError(f"segment name is {name!r}; must begin with {SEGMENT_PREFIX!r}")
        try:
            file = os.open(SEGMENT_DIRECTORY / name, os.O_RDONLY if read_only else os.O_RDWR)
            try:
                return cls(name, file, owner=False, read_only=read_only)
            except OSError:
                os.close(file)
                raise
        except OSError as error:
            raise TransferError(f"segment {name}: {error}") from error

    def prefault(self) -> None:
        """Makes every page of it known to this process now.

        The first write to each page costs more than all that follow; a fresh worker's first
        handoffs would pay for it.
        """
        # Not of every kernel (Linux 5.14); pages then come as they are touched.
        with contextlib.suppress(OSError):
            self._map.madvise(MADV_POPULATE_WRITE)

    def close(self) -> bool:
        """Unmaps it, and removes it when this process made it; idempotent.

        Returns:
            Whether it is unmapped. Where somebody still holds a slice, it goes with the last one.
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


def _free_bytes() -> int:
    stat = os.statvfs(SEGMENT_DIRECTORY)
    return stat.f_bavail * stat.f_frsize


def remove_leftovers() -> list[str]:
    """Removes this user's segments whose service no longer lives; returns their names."""
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
        offset: in the segment.
        size_bytes: asked for; what is reserved is that, aligned up.
    """

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaStatistics:
    """Of an arena's reserved bytes, alignment included."""

    total_bytes: int
    used_bytes: int
    largest_free_bytes: int
    num_extents: int


def aligned(size_bytes: int) -> int:
    """What an extent of that size takes."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


class Arena:
    """Extents of [begin, begin + size) of a segment: first fit, neighbours coalesce when freed."""

    def __init__(self, begin: int, size_bytes: int) -> None:
        self._begin = begin
        self._size = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        # Sorted, never adjacent: offsets and sizes of the free runs.
        self._free_offsets = [begin] if self._size else []
        self._free_sizes = [self._size] if self._size else []
        self._used: dict[int, Extent] = {}
        self._used_bytes = 0

    def fits_ever(self, size_bytes: int) -> bool:
        """Whether an empty arena would have room."""
        return aligned(size_bytes) <= self._size

    def allocate(self, size_bytes: int) -> Extent:
        """Reserves an extent of at least one byte.

        Raises:
            NoRoom: no free run is that large now.
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
        """Gives an extent back; exactly once."""
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

    def statistics(self) -> ArenaStatistics:
        return ArenaStatistics(
            self._size, self._used_bytes, max(self._free_sizes, default=0), len(self._used)
        )

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
