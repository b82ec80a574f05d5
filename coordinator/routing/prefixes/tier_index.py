"""Index of the KV blocks that workers hold in one tier, as one bit mask of workers per block.

A worker with a disk may hold millions of blocks. To remove all of them at once would stop the
coordinator, and with it every stream, for seconds. A lost worker's blocks are therefore not found
any more at once, and leave the masks in small steps (`tidy`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from baton.coordinator.routing.prefixes.prefix_match import Masks
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


@dataclass(slots=True, eq=False)
class _Stale:
    """Blocks that a worker does not hold any more, although their masks have its bit.

    Attributes:
        bit: the worker's bit in masks.
        blocks: hashes of the blocks.
        is_forgotten: whether the worker is forgotten, so that its bit never counts.
    """

    bit: int
    blocks: set[int]
    is_forgotten: bool = False


class _CurrentMasks:
    """The masks without the bits of stale blocks."""

    __slots__ = ("_masks", "_stale", "_valid")

    def __init__(self, masks: dict[int, int], every: list[_Stale]) -> None:
        self._masks, self._valid = masks, -1
        for one in every:
            if one.is_forgotten:
                self._valid &= ~one.bit
        self._stale = [one for one in every if not one.is_forgotten]

    def get(self, block: int, default: int, /) -> int:
        mask = self._masks.get(block, default) & self._valid
        for stale in self._stale:
            if mask & stale.bit and block in stale.blocks:
                mask ^= stale.bit
        return mask

    def __len__(self) -> int:
        return len(self._masks)


class TierIndex:
    """Masks of the workers that hold a block, from the workers' reports about one tier.

    At most `max_blocks` blocks are indexed per worker, and blocks reported beyond that are ignored.
    Reports of unknown workers are ignored. Memory is bounded if the owner calls `tidy` for at least
    as many blocks as are stored: the stale blocks are then never more than workers have held at
    the same time.
    """

    def __init__(self) -> None:
        # Mask of the workers that hold a block or have it among their stale blocks; never 0.
        self._masks: dict[int, int] = {}
        self._blocks: dict[WorkerKey, _Blocks] = {}
        # The largest first. The smallest are removed first, so that a worker that comes and goes
        # with few blocks does not have to wait for its earlier slots (PrefixIndex).
        self._stale: list[_Stale] = []

    @property
    def masks(self) -> Masks:
        """Masks of the workers that hold a block, by block hash; valid until the index changes."""
        return _CurrentMasks(self._masks, self._stale) if self._stale else self._masks

    def add(self, worker: WorkerKey, bit: int, max_blocks: int) -> None:
        """Adds a worker without blocks."""
        assert worker not in self._blocks
        self._blocks[worker] = _Blocks(bit, max_blocks)

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker and its blocks; idempotent.

        The worker's bit may be given to another worker when it `is_free`.
        """
        self.cleared(worker)
        if (found := self._blocks.pop(worker, None)) is not None:
            for stale in self._stale:
                stale.is_forgotten = stale.is_forgotten or stale.bit == found.bit

    @property
    def num_stale(self) -> int:
        """Number of workers' sets of stale blocks."""
        return len(self._stale)

    def is_free(self, bit: int) -> bool:
        """Whether no mask has the bit of a forgotten worker."""
        return all(stale.bit != bit for stale in self._stale)

    def stored(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        found = self._blocks.get(worker)
        if found is None:
            return
        held, masks, bit = found.held, self._masks, found.bit
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
        for stale in self._stale:
            if stale.bit == bit:
                stale.blocks.difference_update(filter(held.__contains__, hashes))

    def removed(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        found = self._blocks.get(worker)
        if found is None:
            return
        held, gone = found.held, list[int]()
        for block in hashes:
            if block in held:
                held.remove(block)
                gone.append(block)
        self._unmask(found.bit, gone)

    def cleared(self, worker: WorkerKey) -> None:
        """Removes all blocks that a worker has reported; takes no longer for many than for few."""
        found = self._blocks.get(worker)
        if found is not None and found.held:
            self._stale.append(_Stale(found.bit, found.held))
            self._stale.sort(key=lambda stale: len(stale.blocks), reverse=True)
            found.held = set()

    def tidy(self, num_blocks: int) -> int:
        """Removes up to this many stale blocks from the masks.

        Returns:
            How many more it would have removed.
        """
        while num_blocks and self._stale:
            stale = self._stale[-1]
            count = min(num_blocks, len(stale.blocks))
            self._unmask(stale.bit, [stale.blocks.pop() for _ in range(count)])
            num_blocks -= count
            if not stale.blocks:
                self._stale.pop()
        return num_blocks

    def _unmask(self, bit: int, blocks: Iterable[int]) -> None:
        """Removes a worker's bit from the masks of blocks, which have it."""
        masks = self._masks
        before, after = bit, 0
        for block in blocks:
            mask = masks[block]
            if mask is not before:
                before, after = mask, mask ^ bit
            if after:
                masks[block] = after
            else:
                del masks[block]

    def check_integrity(self, bits: dict[WorkerKey, int]) -> None:
        """Raises AssertionError if the masks differ from the workers' blocks, or a bit is wrong.

        Args:
            bits: the bit of each worker.
        """
        assert bits == {worker: found.bit for worker, found in self._blocks.items()}
        masks: dict[int, int] = {}
        for found in self._blocks.values():
            assert len(found.held) <= found.max_blocks
        every = [(found.bit, found.held) for found in self._blocks.values()]
        every += [(stale.bit, stale.blocks) for stale in self._stale]
        for bit, blocks in every:
            for block in blocks:
                assert not masks.get(block, 0) & bit
                masks[block] = masks.get(block, 0) | bit
        assert masks == self._masks
