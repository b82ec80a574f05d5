"""Orders of the disk tier (beside vLLM's scheduler) to the ranks' disks, and the ranks' reports."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import NamedTuple, TypeAlias


class BlockName(NamedTuple):
    """A block that the disk holds.

    Attributes:
        key: The engine's hash of the block.
        hash: Baton's hash, by which the coordinator knows the block.
        owner: Directory of all blocks with the same salt (`owner_of`).
        parent: Baton's hash of the block before this one; 0: it is a prompt's first block, or the
            block before it is not known.
    """

    key: bytes
    hash: int
    owner: str
    parent: int = 0

    @property
    def path(self) -> PurePosixPath:
        """The file's place below the directory of a rank."""
        key, parent = self.key.hex(), f"-{self.parent:016x}" if self.parent else ""
        return PurePosixPath(self.owner, key[:2], f"{key}-{self.hash:016x}{parent}")

    @classmethod
    def parse(cls, owner: str, directory: str, name: str) -> BlockName | None:
        """Returns the block that a file holds by its name; None for another file."""
        key, *hashes = name.split("-")
        try:
            block_hash, parent = (int(text, 16) for text in (*hashes, "0")[:2])
            found = cls(bytes.fromhex(key), block_hash, owner, parent)
        except ValueError:
            return None
        return found if found.path == PurePosixPath(owner, directory, name) else None


def owner_of(cache_salt: str) -> str:
    """Returns the directory of the blocks with this salt; the name does not tell the salt."""
    return hashlib.sha256(f"baton owner {cache_salt}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class BlockSelection:
    """The blocks that an operator deletes.

    Attributes:
        owner: Only blocks of this owner; None: of all owners.
        hashes: Only blocks with these hashes of Baton's; None: with any hash.
    """

    owner: str | None = None
    hashes: frozenset[int] | None = None

    @classmethod
    def of(cls, cache_salt: str | None, hashes: Iterable[int] | None) -> BlockSelection:
        """Selects by the salt of requests, None: any; and by hashes, None: any."""
        owner = owner_of(cache_salt) if cache_salt is not None else None
        return cls(owner, frozenset(hashes) if hashes is not None else None)

    def includes(self, block_hash: int, owner: str) -> bool:
        """Whether a block is to be deleted."""
        return self.owner in (owner, None) and (self.hashes is None or block_hash in self.hashes)

    def with_followers(self, blocks: Iterable[tuple[int, int]]) -> BlockSelection:
        """Selects also the blocks that come after selected ones in any prompt or answer.

        Without the blocks before them they cannot be loaded. The coordinator does not know the
        blocks of an output that a client did not get: those that a worker computed after its
        connection broke, while the request went on elsewhere.

        Args:
            blocks: Hashes of blocks and of the blocks before them (BlockName.parent).
        """
        if self.hashes is None:
            return self
        # Nearly every block has one block after it, and there may be millions of blocks.
        after: dict[int, int] = {}
        more: dict[int, set[int]] = {}
        for block_hash, parent in blocks:
            if parent and after.setdefault(parent, block_hash) != block_hash:
                more.setdefault(parent, set()).add(block_hash)
        found, todo = set(self.hashes), list(self.hashes)
        while todo:
            parent = todo.pop()
            if (first := after.get(parent)) is not None:
                new = more.get(parent, set()) | {first}
                todo += new - found
                found |= new
        return replace(self, hashes=frozenset(found))


@dataclass(frozen=True, slots=True)
class Write:
    """Write a block from host memory to its file.

    Attributes:
        order_id: Number of the order, in the report.
        block: The block.
        slot: Index of the block in host memory.
    """

    order_id: int
    block: BlockName
    slot: int


@dataclass(frozen=True, slots=True)
class Load:
    """Load a block from its file to host memory; see Write."""

    order_id: int
    block: BlockName
    slot: int


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the files of blocks; without a report."""

    blocks: list[BlockName]


@dataclass(frozen=True, slots=True)
class DeleteSelected:
    """Delete the files of a selection, also those that the index does not know.

    Attributes:
        order_id: Number of the order, in the report.
        selection: The blocks.
    """

    order_id: int
    selection: BlockSelection


Order: TypeAlias = Write | Load | Delete | DeleteSelected


@dataclass(slots=True)
class DiskReport:
    """Results of a rank's orders since its last report.

    Attributes:
        ended: Numbers of ended orders, and whether the rank did what was ordered; one entry for
            each rank.
        num_wrong: Files that were missing, damaged, cut or of another block; each was deleted.
        off: Why a rank has stopped using its disk; empty while the disk works.
        loaded_bytes: Bytes of the blocks that were loaded.
        load_s: Time in which they were loaded, added up over the ranks.
        has_deleted: Whether a rank has deleted files, also for an order that goes on.
    """

    ended: list[tuple[int, bool]] = field(default_factory=list)
    num_wrong: int = 0
    off: str = ""
    loaded_bytes: int = 0
    load_s: float = 0.0
    has_deleted: bool = False

    def __bool__(self) -> bool:
        return bool(self.ended or self.num_wrong or self.off or self.load_s or self.has_deleted)

    def add(self, other: DiskReport) -> None:
        """Adds another rank's report."""
        self.ended += other.ended
        self.num_wrong += other.num_wrong
        self.off = self.off or other.off
        self.loaded_bytes += other.loaded_bytes
        self.load_s += other.load_s
        self.has_deleted = self.has_deleted or other.has_deleted
