"""One file of the KV store on disk: one rank's part of one KV block, with its checksum.

The header (little-endian) is

    magic 4s | version u16 | rank u16 | key bytes u32 | payload bytes u64 | namespace 32s | key |
    checksum u64

The checksum is XXH3-64, as in the frames of a handoff. It covers the header before it and the
payload. Namespace and key are compared with what the reader expects, so that a file under another
name, of another model or of other weights is not loaded.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from baton.kvtransfer.errors import TransferError

NAMESPACE_BYTES = 32
MAGIC = b"BTKD"
VERSION = 1
_FIELDS = struct.Struct(f"<4sHHIQ{NAMESPACE_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
# Most buffers of one system call (IOV_MAX of Linux).
_MAX_BUFFERS = 1024


class WrongFile(TransferError):
    """The file is missing or is not, byte for byte, the file that was written for this block."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Properties of a block that its file must repeat.

    Attributes:
        namespace: Digest of everything that the bytes of a block depend on beside its tokens, and
            of their arrangement in memory.
        key: The engine's hash of the block, which covers adapter, salt and all earlier tokens.
        rank: Rank whose part of the block the file holds.
    """

    namespace: bytes
    key: bytes
    rank: int

    def header(self, payload_bytes: int) -> bytes:
        """Returns the header without its checksum."""
        fields = (MAGIC, VERSION, self.rank, len(self.key), payload_bytes, self.namespace)
        return _FIELDS.pack(*fields) + self.key


def file_bytes(key_bytes: int, payload_bytes: int) -> int:
    """Returns the size of a file."""
    return _FIELDS.size + key_bytes + _CHECKSUM.size + payload_bytes


def write(path: Path, temporary: Path, identity: Identity, pages: Sequence[memoryview]) -> None:
    """Writes a file whole or not at all; a file of this name is replaced.

    The file is not synced to the disk: after a loss of power it may lack bytes, and is then wrong.

    Args:
        path: Name of the file; its directory is made if only that is missing.
        temporary: Name on the same file system that only this thread uses.
        identity: Identity in the header.
        pages: The block's bytes, one buffer per layer.

    Raises:
        OSError: The file was not written.
    """
    header = identity.header(sum(len(page) for page in pages))
    checksum = _CHECKSUM.pack(_digest(header, pages))
    # Only the owner may read what users have sent.
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, [memoryview(header + checksum), *pages])
    finally:
        os.close(fd)
    try:
        temporary.rename(path)
    except FileNotFoundError:
        # The directory of the tier itself must exist: without it, the disk is not there.
        path.parent.parent.mkdir(mode=0o700, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary.rename(path)


def read(path: Path, identity: Identity, pages: Sequence[memoryview]) -> None:
    """Reads a file into memory, then verifies the bytes that are there.

    Args:
        path: Name of the file.
        identity: Identity that the header must have.
        pages: Where the block's bytes go, one buffer per layer.

    Raises:
        WrongFile: The file is missing or wrong; the memory holds anything.
        OSError: The file could not be read.
    """
    payload_bytes = sum(len(page) for page in pages)
    expected = identity.header(payload_bytes)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise WrongFile(f"{path}: no such file") from error
    try:
        found = bytearray(len(expected) + _CHECKSUM.size)
        size = os.fstat(fd).st_size
        if size != file_bytes(len(identity.key), payload_bytes):
            raise WrongFile(f"{path}: has {size} bytes")
        if not _read_all(fd, [memoryview(found), *pages]):
            raise WrongFile(f"{path}: is cut off")
    finally:
        os.close(fd)
    if found[: len(expected)] != expected:
        raise WrongFile(f"{path}: belongs to another block, model or format")
    if found[len(expected) :] != _CHECKSUM.pack(_digest(expected, pages)):
        raise WrongFile(f"{path}: has a wrong checksum")


def _digest(header: bytes, pages: Sequence[memoryview]) -> int:
    digest = xxhash.xxh3_64(header)
    for page in pages:
        digest.update(page)
    return int(digest.intdigest())


def _write_all(fd: int, buffers: list[memoryview]) -> None:
    while buffers:
        _advance(buffers, os.writev(fd, buffers[:_MAX_BUFFERS]))


def _read_all(fd: int, buffers: list[memoryview]) -> bool:
    """Fills the buffers; returns False if the file ends before."""
    while buffers:
        num_bytes = os.readv(fd, buffers[:_MAX_BUFFERS])
        if not num_bytes:
            return False
        _advance(buffers, num_bytes)
    return True


def _advance(buffers: list[memoryview], num_bytes: int) -> None:
    """Removes the first bytes of the buffers."""
    count = 0
    while count < len(buffers) and num_bytes >= len(buffers[count]):
        num_bytes -= len(buffers[count])
        count += 1
    del buffers[:count]
    if num_bytes:
        buffers[0] = buffers[0][num_bytes:]
