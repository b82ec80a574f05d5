"""The disk tier without an engine: the index, and the files of two ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from baton.kvtransfer.disk.directory import DiskDirectory, namespace_of, rank_directory, scan
from baton.kvtransfer.disk.index import DiskIndex, Ended
from baton.kvtransfer.disk.orders import BlockName, DiskReport, Order, owner_of
from baton.kvtransfer.disk.rank_disk import RankDisk
from baton.v1 import kv_transfer_pb2

NUM_RANKS, NUM_LAYERS, PAGE_BYTES, NUM_SLOTS = 2, 3, 512, 64
PAYLOAD_BYTES = NUM_LAYERS * PAGE_BYTES
FINGERPRINT = {"model": "m", "revision": "weights 1", "num_layers": NUM_LAYERS, "tp_size": 2}


def namespace(**changed: object) -> bytes:
    fields = {**FINGERPRINT, **changed}
    return namespace_of(kv_transfer_pb2.KvFingerprint(**fields), "engine 1")  # type: ignore[arg-type]


def block(number: int, cache_salt: str = "") -> BlockName:
    key = hashlib.sha256(f"{number} {cache_salt}".encode()).digest() + bytes(4)
    return BlockName(key, int.from_bytes(key[:8]), owner_of(cache_salt))


def following(before: BlockName | None, numbers: Iterable[int]) -> list[BlockName]:
    """Returns blocks of a prompt that follow each other and a block; None: the first blocks."""
    blocks, parent = list[BlockName](), before.hash if before is not None else 0
    for number in numbers:
        blocks.append(block(number)._replace(parent=parent))
        parent = blocks[-1].hash
    return blocks


def content(one: BlockName, rank: int) -> np.ndarray:
    """Returns a block's bytes in one rank: shape (NUM_LAYERS, PAGE_BYTES)."""
    made = np.random.default_rng([one.hash, rank]).integers(-128, 128, PAYLOAD_BYTES)
    return made.astype(np.int8).reshape(NUM_LAYERS, PAGE_BYTES)


class Store:
    """A worker's disk tier.

    Args:
        disk_dir: Directory that workers share.
        max_blocks: Number of blocks that the disk may hold.
        found: Namespace of files that are there already; empty: a new namespace.
    """

    def __init__(self, disk_dir: Path, max_blocks: int = 10**6, found: bytes = b"") -> None:
        self.namespace = found or namespace()
        self.directory = DiskDirectory.open(disk_dir, self.namespace, NUM_RANKS)
        self.now_s = 0.0
        self.index = DiskIndex(max_blocks, NUM_SLOTS // 2, NUM_RANKS, lambda: self.now_s)
        self.memory = np.zeros((NUM_RANKS, NUM_LAYERS, NUM_SLOTS, PAGE_BYTES), dtype=np.int8)
        before = scan(self.directory.path, NUM_RANKS, PAYLOAD_BYTES, lambda _: None)
        self.index.found(before.blocks, before.num_wrong)
        self.num_wrong, self.off = 0, ""
        self.loaded_bytes, self.load_s = 0, 0.0

    def step(self) -> list[Ended]:
        """Runs the orders in all ranks to their end."""
        report = self.run(self.index.take_orders())
        self.loaded_bytes += report.loaded_bytes
        self.load_s += report.load_s
        ended = self.index.reported(report)
        counts = self.index.take_counts()
        self.num_wrong += counts.num_wrong
        self.off = self.off or counts.off
        return ended

    def run(self, orders: Sequence[Order]) -> DiskReport:
        """Runs orders in all ranks to their end; returns what the ranks report."""
        report = DiskReport()
        for rank in range(NUM_RANKS):
            disk = RankDisk(
                rank_directory(self.directory.path, rank),
                self.namespace,
                rank,
                lambda slot, rank=rank: [  # type: ignore[misc]
                    memoryview(layer[slot]).cast("B") for layer in self.memory[rank]
                ],
            )
            disk.submit(orders)
            disk.close(60)
            if (part := disk.take_report()) is not None:
                report.add(part)
        return report

    def pass_time(self, seconds: float) -> None:
        """Makes steps without reports for this long, four in a second."""
        for _ in range(round(4 * seconds)):
            self.now_s += 0.25
            self.index.check_time()

    def write(self, blocks: Sequence[BlockName]) -> list[bool]:
        """Writes blocks one after the other; returns which of them the disk holds."""
        return [self._write(one) for one in blocks]

    def _write(self, one: BlockName) -> bool:
        if not self.index.accepts(one.key):
            return False
        for rank in range(NUM_RANKS):
            self.memory[rank, :, 0] = content(one, rank)
        self.index.write(one, 0)
        (ended,) = self.step()
        # Deletes what a failed write has left.
        self.step()
        return ended.done

    def load(self, one: BlockName) -> bool:
        """Loads a block; returns whether it was found. Wrong bytes fail the test."""
        if one.key not in self.index:
            return False
        self.memory[:, :, 1] = 0
        self.index.load(one.key, 1)
        (ended,) = self.step()
        if ended.done:
            for rank in range(NUM_RANKS):
                assert np.array_equal(self.memory[rank, :, 1], content(one, rank))
        self.step()
        return ended.done

    def path(self, one: BlockName, rank: int) -> Path:
        return rank_directory(self.directory.path, rank) / one.path

    def files(self) -> set[Path]:
        ranks = [rank_directory(self.directory.path, rank) for rank in range(NUM_RANKS)]
        return {one for rank in ranks for one in rank.rglob("*-*") if one.is_file()}

    def directories(self) -> set[Path]:
        """Returns the directories of owners and of their groups."""
        ranks = [rank_directory(self.directory.path, rank) for rank in range(NUM_RANKS)]
        return {one for rank in ranks for one in rank.rglob("*") if one.is_dir()}

    def close(self) -> None:
        self.directory.close()
