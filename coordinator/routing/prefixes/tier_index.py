"""Index of the KV blocks that workers hold in one tier, as one bit mask of workers per block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.coordinator.state.requests import WorkerKey


@dataclass(slots=True, eq=False)
class _Blocks:
    """One worker's part of the index.

    Attributes:
        bit: the worker's bit in masks.
        max_blocks: maximum number of blocks indexed for the worker.
        held: hashes that the worker has reported.
    """

    bit: int
    max_blocks: int
    held: set[int] = field(default_factory=set)


class TierIndex:
    """Masks of the workers that hold a block, from the workers' reports about one tier.

    Memory is bounded: at most `max_blocks` blocks are indexed per worker, and blocks reported
    beyond that are ignored. Reports of unknown workers are ignored.

    Attributes:
        masks: mask of the workers that hold a block, by block hash; never 0. Read-only for callers.
    """

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._blocks: dict[WorkerKey, _Blocks] = {}

    def add(self, worker: WorkerKey, bit: int, max_blocks: int) -> None:
        """Adds a worker without blocks."""
        assert worker not in self._blocks
        self._blocks[worker] = _Blocks(bit, max_blocks)

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker and its blocks; idempotent."""
        self.cleared(worker)
        self._blocks.pop(worker, None)

    def stored(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        found = self._blocks.get(worker)
        if found is None:
            return
        held, masks, bit = found.held, self.masks, found.bit
        before, after = 0, bit
        for block in hashes:
            if block in held or len(held) == found.max_blocks:
                continue
            held.add(block)
            mask = masks.get(block, 0)
            # Neighbours with the same holders share one mask object, which saves memory.
            if mask is not before:
                before, after = mask, mask | bit
            masks[block] = after

    def removed(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        found = self._blocks.get(worker)
        if found is None:
            return
        held, masks, bit = found.held, self.masks, found.bit
        before, after = bit, 0
        for block in hashes:
            if block not in held:
                continue
            held.remove(block)
            mask = masks[block]
            if mask is not before:
                before, after = mask, mask ^ bit
            if after:
                masks[block] = after
            else:
                del masks[block]

    def cleared(self, worker: WorkerKey) -> None:
        """Removes all blocks that a worker has reported."""
        if worker in self._blocks:
            self.removed(worker, list(self._blocks[worker].held))

    def check_integrity(self, bits: dict[WorkerKey, int]) -> None:
        """Raises AssertionError if the masks differ from the workers' blocks, or a bit is wrong.

        Args:
            bits: the bit of each worker.
        """
        assert bits == {worker: found.bit for worker, found in self._blocks.items()}
        masks: dict[int, int] = {}
        for found in self._blocks.values():
            assert len(found.held) <= found.max_blocks
            for block in found.held:
                masks[block] = masks.get(block, 0) | found.bit
        assert masks == self.masks
