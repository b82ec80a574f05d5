"""Which worker holds which blocks of which prompts, so that a prompt can go where its prefix is.

Blocks are named by chained hashes (runtime/block_hashes.py). What workers report is exact; beside
it stands what the coordinator expects: a prompt that was dispatched to a worker and is not computed
yet will be there soon, which keeps a burst of equal prompts together.

Sets of workers are bit masks, one bit per worker, and neighbouring blocks share one mask object as
a rule: a walk over a prefix compares identities and only looks at masks where holders change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from baton.coordinator.request import WorkerKey


class Holder(NamedTuple):
    """A worker, and how many of a prompt's first blocks it holds or soon will."""

    worker: WorkerKey
    num_blocks: int


@dataclass(slots=True, eq=False)
class _Cache:
    """One worker's part of the index.

    Attributes:
        held: reported hashes, oldest report first.
        expected: ids of the requests that are expected here.
    """

    worker: WorkerKey
    slot: int
    max_blocks: int
    held: dict[int, None] = field(default_factory=dict)
    expected: set[str] = field(default_factory=set)


class _Expected(NamedTuple):
    worker: WorkerKey
    hashes: Sequence[int]


class PrefixMatch:
    """Who holds how much of one prompt, as of when it was asked.

    Args:
        levels: (num_blocks, mask): the workers that hold that many blocks or more; deeper levels
            later, each mask a subset of the one before.
        expected: blocks by worker, from prompts under way there.
        slots, workers: the index's, by worker and by slot.
        turn: the slot to begin with among equals.
    """

    __slots__ = ("_expected", "_levels", "_slots", "_turn", "_workers")

    def __init__(
        self,
        levels: list[tuple[int, int]],
        expected: dict[WorkerKey, int],
        slots: dict[WorkerKey, _Cache],
        workers: list[WorkerKey | None],
        turn: int,
    ) -> None:
        self._levels, self._expected = levels, expected
        self._slots, self._workers, self._turn = slots, workers, turn

    def blocks_of(self, worker: WorkerKey) -> int:
        """How many of the prompt's first blocks this worker holds or soon will."""
        cache, levels = self._slots.get(worker), self._levels
        if cache is None:
            return 0
        expected = self._expected.get(worker, 0)
        num_levels = bisect_left(levels, True, key=lambda level: not level[1] >> cache.slot & 1)
        return max(expected, levels[num_levels - 1][0]) if num_levels else expected

    def longest(self, limit: int, among: int = -1) -> list[Holder]:
        """Up to `limit` workers with the longest prefixes, longest first.

        Of more equals than fit, each call takes others than the last.

        Args:
            limit: at least 1.
            among: mask of the workers that count (PrefixIndex.bit).
        """
        found: dict[WorkerKey, int] = {}
        for num_blocks, mask in reversed(self._levels):
            mask &= among
            while mask and len(found) < limit:
                ahead = mask >> self._turn << self._turn or mask
                bit = ahead & -ahead
                mask ^= bit
                among ^= bit
                worker = self._workers[bit.bit_length() - 1]
                assert worker is not None
                found[worker] = num_blocks
        for worker, num_blocks in self._expected.items():
            in_question = worker in found or among >> self._slots[worker].slot & 1
            if in_question and found.get(worker, 0) < num_blocks:
                found[worker] = num_blocks
        holders = [Holder(worker, num_blocks) for worker, num_blocks in found.items()]
        holders.sort(key=lambda holder: -holder.num_blocks)
        return holders[:limit]


class PrefixIndex:
    """Fed by workers' cache events; asked by the router.

    Memory is bounded by the workers' caches: each counts at most the blocks it was added with,
    beyond which its oldest reports are forgotten. An expectation lives as long as its request
    waits for its first token.

    Args:
        max_expected: prompts under way that one query looks at per depth, most recent first.
    """

    def __init__(self, max_expected: int = 4) -> None:
        self._max_expected = max_expected
        self._caches: dict[WorkerKey, _Cache] = {}
        self._workers: list[WorkerKey | None] = []
        self._free_slots: list[int] = []
        # Mask of the holders by block; never 0.
        self._blocks: dict[int, int] = {}
        self._expected: dict[str, _Expected] = {}
        # Requests expected somewhere, by the hashes of their blocks 1, 2, 4, 8, ...: any two
        # prompts that share n blocks share the largest of these that is at most n.
        self._probes: dict[int, dict[str, None]] = {}
        self._turn = 0

    @property
    def num_blocks(self) -> int:
        """Different blocks known."""
        return len(self._blocks)

    def add(self, worker: WorkerKey, max_blocks: int) -> None:
        """A worker that holds nothing yet, and never more than `max_blocks`."""
        assert worker not in self._caches
        if self._free_slots:
            slot = self._free_slots.pop()
            self._workers[slot] = worker
        else:
            slot = len(self._workers)
            self._workers.append(worker)
        self._caches[worker] = _Cache(worker, slot, max_blocks)

    def bit(self, worker: WorkerKey) -> int:
        """The worker's mask; it stays the same until `forget`."""
        return 1 << self._caches[worker].slot

    # ---- Events; those of unknown workers are ignored.

    def stored(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        cache = self._caches.get(worker)
        if cache is None:
            return
        held, blocks, bit = cache.held, self._blocks, 1 << cache.slot
        before, after = 0, bit
        for block in hashes:
            if block in held:
                continue
            held[block] = None
            mask = blocks.get(block, 0)
            # Neighbours with the same holders get the same object.
            if mask is not before:
                before, after = mask, mask | bit
            blocks[block] = after
        if len(held) > cache.max_blocks:
            self.removed(worker, list(islice(held, len(held) - cache.max_blocks)))

    def removed(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        cache = self._caches.get(worker)
        if cache is None:
            return
        held, blocks, bit = cache.held, self._blocks, 1 << cache.slot
        before, after = bit, 0
        for block in hashes:
            if block not in held:
                continue
            del held[block]
            mask = blocks[block]
            if mask is not before:
                before, after = mask, mask ^ bit
            if after:
                blocks[block] = after
            else:
                del blocks[block]

    def cleared(self, worker: WorkerKey) -> None:
        """Nothing of what it reported is there any more."""
        if worker in self._caches:
            self.removed(worker, list(self._caches[worker].held))

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone, and what was expected there with it."""
        cache = self._caches.get(worker)
        if cache is None:
            return
        self.cleared(worker)
        for request_id in list(cache.expected):
            self.settle(request_id)
        del self._caches[worker]
        self._workers[cache.slot] = None
        self._free_slots.append(cache.slot)

    # ---- Expectations.

    def expect(self, request_id: str, worker: WorkerKey, hashes: Sequence[int]) -> None:
        """A prompt is on its way to a worker, which will hold it. Costs O(log blocks)."""
        assert request_id not in self._expected
        cache = self._caches.get(worker)
        if cache is None or not hashes:
            return
        cache.expected.add(request_id)
        self._expected[request_id] = _Expected(worker, hashes)
        for depth in _depths(len(hashes)):
            self._probes.setdefault(hashes[depth - 1], {})[request_id] = None

    def settle(self, request_id: str) -> None:
        """The prompt is computed, or never will be: from here on its worker's reports count."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        self._caches[expected.worker].expected.remove(request_id)
        for depth in _depths(len(expected.hashes)):
            block = expected.hashes[depth - 1]
            requests = self._probes[block]
            del requests[request_id]
            if not requests:
                del self._probes[block]

    # ---- Queries.

    def match(self, hashes: Sequence[int]) -> PrefixMatch:
        """Who holds how many of a prompt's first blocks.

        Costs a few ten nanoseconds per block that anybody holds, and no more per worker than the
        bits of a mask.
        """
        levels: list[tuple[int, int]] = []
        depth, reach, last = 0, -1, None
        for holders in map(self._blocks.get, hashes):
            if holders is not last:
                if holders is None:
                    break
                still = reach & holders
                if still != reach:
                    if depth:
                        levels.append((depth, reach))
                    reach = still
                    if not reach:
                        break
                last = holders
            depth += 1
        if depth and reach:
            levels.append((depth, reach))
        self._turn = (self._turn + 1) % max(1, len(self._workers))
        return PrefixMatch(
            levels, self._expected_of(hashes), self._caches, self._workers, self._turn
        )

    def _expected_of(self, hashes: Sequence[int]) -> dict[WorkerKey, int]:
        """Blocks that prompts under way share with this one, by worker; the longest few."""
        found: dict[WorkerKey, int] = {}
        if not self._expected:
            return found
        for depth in reversed(_depths(len(hashes))):
            requests = self._probes.get(hashes[depth - 1], ())
            for request_id in islice(reversed(requests), self._max_expected):
                worker, others = self._expected[request_id]
                end = min(len(hashes), len(others))
                # Chained hashes are equal up to some block and never after it.
                common = bisect_left(
                    range(end), True, lo=depth, key=lambda at: hashes[at] != others[at]
                )
                if found.get(worker, 0) < common:
                    found[worker] = common
            if len(found) >= self._max_expected:
                break
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError when the masks and what each worker holds differ."""
        masks: dict[int, int] = {}
        for cache in self._caches.values():
            assert self._workers[cache.slot] == cache.worker
            assert len(cache.held) <= cache.max_blocks
            for block in cache.held:
                masks[block] = masks.get(block, 0) | 1 << cache.slot
        assert masks == self._blocks
        probed = {request_id for requests in self._probes.values() for request_id in requests}
        expected = [one for cache in self._caches.values() for one in cache.expected]
        assert probed == set(expected) == self._expected.keys()
        assert len(expected) == len(set(expected))


def _depths(num_blocks: int) -> list[int]:
    """1, 2, 4, 8, ... up to `num_blocks`."""
    return [1 << power for power in range(num_blocks.bit_length())]
