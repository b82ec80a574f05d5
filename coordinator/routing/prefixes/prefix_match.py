"""The prefix of one prompt that each worker holds, by tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest
from itertools import accumulate, islice, repeat, takewhile
from operator import and_, itemgetter, or_
from typing import NamedTuple, Protocol, TypeAlias

from baton.coordinator.state.requests import RequestKey, WorkerKey

# Largest number of blocks that a look-up across tiers tests; of longer prompts it tests every
# second block, or every third, and so on.
MAX_TESTED_BLOCKS = 1024

# Expected requests by worker; workers and requests are each ordered by time, the latest last.
Probe: TypeAlias = dict[WorkerKey, dict[RequestKey, None]]


class HeldPrefix(NamedTuple):
    """The leading blocks of a prompt that a worker need not compute.

    Attributes:
        num_device: blocks in the engine's prefix cache, on the device.
        num_total: these blocks and the blocks in host memory or on disk that follow them.
        num_disk: those of the following blocks that only the disk has.
    """

    num_device: int
    num_total: int
    num_disk: int = 0


NOTHING_HELD = HeldPrefix(0, 0)


class Masks(Protocol):
    """Masks of workers by block hash."""

    def get(self, block: int, default: int, /) -> int: ...

    def __len__(self) -> int: ...


# Number of workers with the longest prefixes that a placement compares, for `PrefixMatch.holders`.
NUM_HOLDERS = 3


class Expected(NamedTuple):
    """A prompt that a worker's prefix cache will hold soon."""

    worker: WorkerKey
    hashes: Sequence[int]


class PrefixMatch:
    """The prefix of one prompt that each worker holds; valid until the index changes.

    A worker is assumed to hold on its device all blocks before a block that it holds there, so that
    device prefixes are found by binary search. Host memory and the disk may have gaps. The prefix
    across all tiers is therefore found block by block, once for all workers.

    Args:
        hashes: Block hashes of the prompt.
        device: Masks of the workers that hold a block on the device, by block hash.
        host: Masks of the workers that hold a block in host memory.
        disk: Masks of the workers that hold a block on disk.
        slots: Slots of the workers in masks.
        workers: The workers by slot.
        expected: Expected prompts by request ID.
        probes: Pairs (num_blocks, requests by worker): expected prompts that share at least
            num_blocks blocks, in ascending order; each is a subset of the previous one.
        turn: Slot that comes first among workers with equally long prefixes.
    """

    __slots__ = (
        "_device",
        "_device_masks",
        "_disk",
        "_expected",
        "_expecting",
        "_hashes",
        "_host",
        "_is_new",
        "_probes",
        "_slots",
        "_stride",
        "_total_masks",
        "_turn",
        "_workers",
    )

    def __init__(
        self,
        hashes: Sequence[int],
        device: Masks,
        host: Masks,
        disk: Masks,
        slots: Mapping[WorkerKey, int],
        workers: Sequence[WorkerKey | None],
        expected: Mapping[RequestKey, Expected],
        probes: Sequence[tuple[int, Probe]],
        turn: int,
    ) -> None:
        self._hashes, self._device, self._host, self._disk = hashes, device, host, disk
        self._slots, self._workers = slots, workers
        self._expected, self._probes = expected, probes
        self._turn = turn
        # No worker holds the prompt's first block or is expected to hold it soon.
        self._is_new = not probes and not (
            len(hashes) and any(tier.get(hashes[0], 0) for tier in (device, host, disk))
        )
        # Results of look-ups so far, by number of blocks.
        self._device_masks: dict[int, int] = {}
        self._stride = max(1, -(-len(hashes) // MAX_TESTED_BLOCKS))
        self._total_masks: list[int] | None = None
        self._expecting: dict[WorkerKey, int] = {}

    def blocks_of(self, worker: WorkerKey) -> int:
        """Number of the prompt's first blocks that a worker's device holds or will hold soon."""
        slot = self._slots.get(worker)
        if self._is_new or slot is None:
            return 0
        held = self._on_device(slot)
        for depth, probe in reversed(self._probes):
            if 2 * depth <= held:
                break
            if worker in probe:
                return max(held, self._common(probe[worker], depth))
        return held

    def held_by(self, worker: WorkerKey) -> HeldPrefix:
        """The prompt's first blocks that a worker holds, or is expected to hold soon."""
        return self._with_host(worker, self.blocks_of(worker))

    def reported_by(self, worker: WorkerKey) -> HeldPrefix:
        """The prompt's first blocks that a worker holds now, by its reports."""
        slot = self._slots.get(worker)
        if self._is_new or slot is None:
            return NOTHING_HELD
        return self._with_host(worker, self._on_device(slot))

    def _on_device(self, slot: int) -> int:
        return self._deepest(self._device_mask, 1 << slot, len(self._hashes))

    def _with_host(self, worker: WorkerKey, num_device: int) -> HeldPrefix:
        slot = self._slots.get(worker)
        if not (self._host or self._disk) or self._is_new or slot is None:
            return HeldPrefix(num_device, num_device)
        masks = self._masks_of_total()
        num_total = self._deepest(self._total_mask, 1 << slot, len(masks)) * self._stride
        if num_total <= num_device:
            return HeldPrefix(num_device, num_device)
        return HeldPrefix(num_device, num_total, self._num_disk(1 << slot, num_device, num_total))

    def _num_disk(self, bit: int, begin: int, end: int) -> int:
        """Number of blocks from `begin` to `end` that a worker holds only on disk."""
        if not self._disk:
            return 0
        first = begin // self._stride * self._stride + self._stride - 1
        tested = self._hashes[first : end : self._stride]
        held = (self._device.get(one, 0) | self._host.get(one, 0) for one in tested)
        num_missing = sum(1 for mask in held if not mask & bit)
        return min(end - begin, num_missing * self._stride)

    def longest(self, limit: int, among: int = -1) -> dict[WorkerKey, int]:
        """Up to `limit` workers with the longest prefixes on the device, with their blocks.

        If more workers with equal prefixes exist than fit, queries take turns among them.

        Args:
            limit: maximum number of workers; at least 1.
            among: mask of the workers to consider (PrefixIndex.bit).
        """
        if self._is_new:
            return {}
        found = self._ranked(self._device_mask, len(self._hashes), limit, among)
        for worker, num_blocks in self._expected_by_worker(limit).items():
            if found.get(worker, 0) < num_blocks and among >> self._slots[worker] & 1:
                found[worker] = num_blocks
        if len(found) <= limit:
            return found
        return dict(nlargest(limit, found.items(), key=itemgetter(1)))

    def holders(self, limit: int, among: int = -1) -> dict[WorkerKey, HeldPrefix]:
        """The workers with the longest prefixes on the device, and those with the longest at all.

        Args:
            limit: maximum number of workers of each kind; at least 1.
            among: mask of the workers to consider (PrefixIndex.bit).
        """
        if self._is_new:
            return {}
        found = self.longest(limit, among)
        if self._host or self._disk:
            masks = self._masks_of_total()
            found |= self._ranked(self._total_mask, len(masks), limit, among)
        return {worker: self.held_by(worker) for worker in found}

    def reported_holders(self, limit: int, among: int = -1) -> dict[WorkerKey, HeldPrefix]:
        """Up to `limit` workers that hold the longest prefixes now, by their reports.

        Args:
            limit: maximum number of workers; at least 1.
            among: mask of the workers to consider (PrefixIndex.bit).
        """
        if self._is_new:
            return {}
        if self._host or self._disk:
            found = self._ranked(self._total_mask, len(self._masks_of_total()), limit, among)
        else:
            found = self._ranked(self._device_mask, len(self._hashes), limit, among)
        return {worker: self.reported_by(worker) for worker in found}

    def _ranked(
        self, mask_at: Callable[[int], int], most: int, limit: int, among: int
    ) -> dict[WorkerKey, int]:
        """Up to `limit` workers with the greatest depths, the deepest first; see `_deepest`."""
        found, turn, left, depth = dict[WorkerKey, int](), self._turn, among, most
        while len(found) < limit and (depth := self._deepest(mask_at, left, depth)):
            mask = mask_at(depth) & left
            left ^= mask
            while mask and len(found) < limit:
                ahead = mask >> turn << turn or mask
                bit = ahead & -ahead
                mask ^= bit
                worker = self._workers[bit.bit_length() - 1]
                assert worker is not None
                found[worker] = depth
            depth -= 1
        return found

    def _device_mask(self, num_blocks: int) -> int:
        """Mask of the workers whose device holds the block that ends this prefix."""
        mask = self._device_masks.get(num_blocks, -1)
        if mask < 0:
            mask = self._device.get(self._hashes[num_blocks - 1], 0)
            self._device_masks[num_blocks] = mask
        return mask

    def _total_mask(self, num_strides: int) -> int:
        """Mask of the workers that hold all tested blocks of this prefix, each in any tier."""
        return self._masks_of_total()[num_strides - 1]

    def _masks_of_total(self) -> list[int]:
        """The results of `_total_mask` for 1, 2, 3, ... strides, as far as any worker holds them.

        A gap that lies between two tested blocks is not seen.
        """
        if self._total_masks is None:
            tested, none = self._hashes[self._stride - 1 :: self._stride], repeat(0)
            held = map(or_, map(self._device.get, tested, none), map(self._host.get, tested, none))
            if self._disk:
                held = map(or_, held, map(self._disk.get, tested, none))
            self._total_masks = list(takewhile(bool, accumulate(held, and_)))
        return self._total_masks

    @staticmethod
    def _deepest(mask_at: Callable[[int], int], among: int, most: int) -> int:
        """The greatest depth, at most `most`, that any worker in `among` reaches.

        Args:
            mask_at: mask of the workers that reach a depth; a worker reaches all smaller ones too.
            among: mask of the workers to consider.
            most: greatest depth to try.
        """
        low, high, middle = 0, most, 1
        # Tries 1, 2, 4, ... until no worker reaches the depth, then does a binary search.
        doubling = True
        while low < high:
            if mask_at(middle) & among:
                low = middle
            else:
                high, doubling = middle - 1, False
            middle = min(2 * middle, high) if doubling else (low + high + 1) // 2
        return low

    def _expected_by_worker(self, limit: int) -> dict[WorkerKey, int]:
        """Expected prefix blocks of the workers to which the most similar prompts were sent."""
        found = self._expecting
        for depth, probe in reversed(self._probes):
            if len(found) >= limit:
                break
            for worker in islice(reversed(probe), limit):
                if worker not in found:
                    found[worker] = self._common(probe[worker], depth)
        return found

    def _common(self, requests: dict[RequestKey, None], least: int) -> int:
        """Number of first blocks that the latest of these requests shares with the prompt.

        At least `least`. Only the latest request is compared; an earlier request may share up to
        twice as many blocks. Chained hashes are equal up to some block and never after it.
        """
        hashes, others = self._hashes, self._expected[next(reversed(requests))].hashes
        low, high = least, min(len(hashes), len(others), 2 * least)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] == others[middle]:
                low = middle + 1
            else:
                high = middle
        return low
