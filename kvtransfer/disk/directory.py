"""The directory of one worker's KV blocks on disk, which the worker finds again after a restart.

    disk_dir/worker-N/lock                      held by the running worker
                      layout                    namespace of all files
                      rank-R/written            a file until it is whole
                      rank-R/OWNER/XX/KEY-HASH-PARENT
                                                  one block's part of one rank (BlockName.path)

A worker takes the first directory that no running worker holds, and prefers one with its own
layout. It empties a directory with another layout, whose model or weights no running worker of this
directory serves. So the number of directories is at most the number of workers that have run at the
same time, and each directory has a bound.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.kvtransfer.disk.block_file import file_bytes
from baton.kvtransfer.disk.orders import BlockName
from baton.v1 import kv_transfer_pb2

# Most workers that share one directory.
_MAX_WORKERS = 256
# A search for the blocks of an earlier worker tells this often that it goes on.
_TELL_EVERY_S = 60.0


def namespace_of(fingerprint: kv_transfer_pb2.KvFingerprint, engine: str) -> bytes:
    """Returns the digest of everything that the bytes of a block depend on beside its tokens.

    Args:
        fingerprint: Covers the layout, the model's weights and configuration, and the adapters.
        engine: The engine's version, how it makes the keys of blocks, and its settings that change
            the content of blocks.
    """
    text = fingerprint.SerializeToString(deterministic=True)
    return hashlib.sha256(engine.encode() + b"\0" + text).digest()


def rank_directory(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}"


def temporary_file(directory: Path) -> Path:
    """Returns the file in a rank's directory that a block has until it is whole."""
    return directory / "written"


def remove_empty(group: Path) -> None:
    """Removes the directory of a group, then that of its owner, unless they hold something."""
    with contextlib.suppress(OSError):
        group.rmdir()
        group.parent.rmdir()


class DiskDirectory:
    """A worker's own directory, locked until `close` or the end of the process.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock

    @classmethod
    def open(cls, disk_dir: Path, namespace: bytes, num_ranks: int) -> DiskDirectory:
        """Takes a directory below `disk_dir`, which is made if it is missing.

        Raises:
            OSError: `disk_dir` cannot be used.
        """
        disk_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        layout, spare = namespace.hex().encode(), None
        for number in range(_MAX_WORKERS):
            path = disk_dir / f"worker-{number}"
            if spare is not None and not path.exists():
                break
            if (lock := _locked(path)) is None:
                continue
            if _layout_of(path) == layout:
                if spare is not None:
                    spare.close()
                spare = cls(path, lock)
                break
            if spare is None:
                spare = cls(path, lock)
            else:
                os.close(lock)
        if spare is None:
            raise OSError(f"{disk_dir} has {_MAX_WORKERS} directories of workers, all in use")
        try:
            spare._begin(layout, num_ranks)
        except BaseException:
            spare.close()
            raise
        return spare

    def _begin(self, layout: bytes, num_ranks: int) -> None:
        """Prepares the directory for blocks of this layout; empties it if it has another one."""
        is_same = _layout_of(self.path) == layout
        if not is_same:
            (self.path / "layout").unlink(missing_ok=True)
            for old in self.path.glob("rank-*"):
                shutil.rmtree(old)
        for rank in range(num_ranks):
            directory = rank_directory(self.path, rank)
            directory.mkdir(mode=0o700, exist_ok=True)
            # A killed worker leaves a part of a block there, of any tenant.
            temporary_file(directory).unlink(missing_ok=True)
        if not is_same:
            (self.path / "layout").write_bytes(layout)

    def close(self) -> None:
        """Leaves the directory to other workers; idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _locked(path: Path) -> int | None:
    """Returns the lock of a worker's directory; None if another worker holds it."""
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        return None
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock


def _layout_of(path: Path) -> bytes:
    try:
        return (path / "layout").read_bytes()
    except FileNotFoundError:
        return b""


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks of an earlier worker.

    Attributes:
        blocks: Blocks of which every rank has its file, the last used one first (`_by_use`).
        num_wrong: Files that were deleted because they are no whole block.
    """

    blocks: list[BlockName]
    num_wrong: int


def scan(
    directory: Path, num_ranks: int, payload_bytes: int, on_wait: Callable[[int], None]
) -> Found:
    """Finds the blocks of an earlier worker by the names and sizes of their files.

    Their content is verified when it is loaded. Files that are no whole block are deleted, and so
    are directories without files. The worker writes nothing until the end
    (DiskIndex.is_searching), because files that are not found yet may take up its room.

    Args:
        directory: The worker's directory.
        num_ranks: Number of ranks.
        payload_bytes: Bytes of a rank's part of a block.
        on_wait: Called about every minute with the number of blocks found so far. A slow disk may
            need many minutes. Only the whole search knows which blocks were used last.

    Raises:
        OSError: The directory cannot be read.
    """
    told_at = time.monotonic()
    found: list[tuple[float, BlockName]] = []
    num_wrong = 0
    ranks = [rank_directory(directory, rank) for rank in range(num_ranks)]
    for owner, group in sorted({place for rank in ranks for place in _groups(rank)}):
        if (now := time.monotonic()) > told_at + _TELL_EVERY_S:
            on_wait(len(found))
            told_at = now
        by_rank, num_before = [_files(rank / owner / group) for rank in ranks], len(found)
        for name in {name for files in by_rank for name in files}:
            block = BlockName.parse(owner, group, name)
            size = file_bytes(len(block.key), payload_bytes) if block is not None else -1
            parts = [part for files in by_rank if (part := files.get(name)) is not None]
            used_at = max(part.st_mtime for part in parts)
            is_whole = len(parts) == num_ranks and all(part.st_size == size for part in parts)
            if block is not None and is_whole:
                found.append((used_at, block))
                continue
            num_wrong += 1
            for rank in ranks:
                (rank / owner / group / name).unlink(missing_ok=True)
        if len(found) == num_before:
            for rank in ranks:
                remove_empty(rank / owner / group)
    for rank in ranks:
        # A worker may have been killed after it removed the last group of an owner.
        for one in os.scandir(rank):
            with contextlib.suppress(OSError):
                os.rmdir(one)
    return Found(_by_use(found), num_wrong)


def _by_use(found: list[tuple[float, BlockName]]) -> list[BlockName]:
    """Returns the blocks in the order of their last use; blocks before a block follow their prompt.

    A file's time is that of its write or of its latest load from disk. A turn of a conversation
    whose earlier blocks were on the device or in host memory wrote only new blocks, but it used all
    blocks before them. Without a block, the blocks after it are of no use.

    Args:
        found: The times and the names of files.
    """
    by_hash = {block.hash: block for _, block in found}
    twice = [block for _, block in found if by_hash[block.hash] is not block]
    order = list[BlockName]()
    for _, last in sorted(found, reverse=True):
        prompt = list[BlockName]()
        block = by_hash.pop(last.hash, None)
        while block is not None:
            prompt.append(block)
            block = by_hash.pop(block.parent, None)
        order += reversed(prompt)
    return order + twice


def _groups(rank: Path) -> Iterator[tuple[str, str]]:
    """Yields the directories of a rank's files: (owner, group)."""
    for owner in os.scandir(rank):
        if owner.is_dir(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):
                for group in os.scandir(owner):
                    if group.is_dir(follow_symlinks=False):
                        yield owner.name, group.name


def _files(directory: Path) -> dict[str, os.stat_result]:
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for one in os.scandir(directory):
            with contextlib.suppress(FileNotFoundError):
                found[one.name] = one.stat(follow_symlinks=False)
    return found
