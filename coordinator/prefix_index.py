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
from heapq import nlargest
from itertools import islice
from typing import NamedTuple

from baton.coordinator.request import WorkerKey


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
    """Who holds how much of one prompt; good until the index changes.

    Args:
        index: that was asked.
        hashes: of the prompt.
        levels: (num_blocks, mask): the workers that hold that many blocks or more; deeper levels
            later, each mask a subset of the one before.
    """

    __slots__ = ("_expecting", "_hashes", "_index", "_levels")

    def __init__(
        self, index: PrefixIndex, hashes: Sequence[int], levels: list[tuple[int, int]]
    ) -> None:
        self._index, self._hashes, self._levels = index, hashes, levels
        self._expecting: dict[WorkerKey, int] | None = None

    def blocks_of(self, worker: WorkerKey) -> int:
        """How many of the prompt's first blocks this worker holds or soon will."""
        index, levels = self._index, self._levels
        cache = index.caches.get(worker)
        if cache is None:
            return 0
        slot = cache.slot
        num_levels = bisect_left(levels, True, key=lambda level: not level[1] >> slot & 1)
        held = levels[num_levels - 1][0] if num_levels else 0
        return max(held, index.expected_of(cache, self._hashes, held)) if cache.expected else held

    def longest(self, limit: int, among: int = -1) -> dict[WorkerKey, int]:
        """Up to `limit` workers with the longest prefixes, and how many blocks each has.

        What is held comes before what is expected. Of more equals than fit, each query takes
        others than the last.

        Args:
            limit: at least 1.
            among: mask of the workers that count (PrefixIndex.bit).
        """
        index, found = self._index, dict[WorkerKey, int]()
        turn, workers = index.turn, index.workers
        for num_blocks, mask in reversed(self._levels):
            mask &= among
            while mask and len(found) < limit:
                ahead = mask >> turn << turn or mask
                bit = ahead & -ahead
                mask ^= bit
                among ^= bit
                worker = workers[bit.bit_length() - 1]
                assert worker is not None
                found[worker] = num_blocks
        if self._expecting is None:
            self._expecting = index.expecting(self._hashes, limit)
        for worker, num_blocks in self._expecting.items():
            if found.get(worker, 0) < num_blocks and (worker in found or among & index.bit(worker)):
                found[worker] = num_blocks
        if len(found) <= limit:
            return found
        longest = nlargest(limit, found.items(), key=lambda item: item[1])
        return dict(longest)


class PrefixIndex:
    """Fed by workers' cache events; asked by the router.

    Memory is bounded by the workers' caches: each counts at most the blocks it was added with,
    beyond which its oldest reports are forgotten. An expectation lives as long as its request
    waits for its first token.

    Attributes:
        caches, workers, turn: for PrefixMatch: by worker; by slot; the slot to begin with among
            equals.
    """

    def __init__(self) -> None:
        self.caches: dict[WorkerKey, _Cache] = {}
        self.workers: list[WorkerKey | None] = []
        self.turn = 0
        self._free_slots: list[int] = []
        # Mask of the holders by block; never 0.
        self._blocks: dict[int, int] = {}
        self._expected: dict[str, _Expected] = {}
        # Requests expected somewhere, by the hashes of their blocks 1, 2, 4, 8, ... and by worker,
        # each latest last. Any two prompts that share n blocks share the largest of these that is
        # at most n.
        self._probes: dict[int, dict[WorkerKey, dict[str, None]]] = {}

    @property
    def num_blocks(self) -> int:
        """Different blocks known."""
        return len(self._blocks)

    def add(self, worker: WorkerKey, max_blocks: int) -> None:
        """A worker that holds nothing yet, and never more than `max_blocks`."""
        assert worker not in self.caches
        if self._free_slots:
            slot = self._free_slots.pop()
            self.workers[slot] = worker
        else:
            slot = len(self.workers)
            self.workers.append(worker)
        self.caches[worker] = _Cache(worker, slot, max_blocks)

    def bit(self, worker: WorkerKey) -> int:
        """The worker's mask; it stays the same until `forget`."""
        return 1 << self.caches[worker].slot

    # ---- Events; those of unknown workers are ignored.

    def stored(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        cache = self.caches.get(worker)
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
        cache = self.caches.get(worker)
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
        if worker in self.caches:
            self.removed(worker, list(self.caches[worker].held))

    def forget(self, worker: WorkerKey) -> None:
        """The worker is gone, and what was expected there with it."""
        cache = self.caches.get(worker)
        if cache is None:
            return
        self.cleared(worker)
        for request_id in list(cache.expected):
            self.settle(request_id)
        del self.caches[worker]
        self.workers[cache.slot] = None
        self._free_slots.append(cache.slot)

    # ---- Expectations.

    def expect(self, request_id: str, worker: WorkerKey, hashes: Sequence[int]) -> None:
        """A prompt is on its way to a worker, which will hold it. Costs O(log blocks)."""
        assert request_id not in self._expected
        cache = self.caches.get(worker)
        if cache is None or not hashes:
            return
        cache.expected.add(request_id)
        self._expected[request_id] = _Expected(worker, hashes)
        for depth in _depths(len(hashes)):
            probe = self._probes.setdefault(hashes[depth - 1], {})
            # The worker moves to the end.
            probe[worker] = requests = probe.pop(worker, {})
            requests[request_id] = None

    def settle(self, request_id: str) -> None:
        """The prompt is computed, or never will be: from here on its worker's reports count."""
        expected = self._expected.pop(request_id, None)
        if expected is None:
            return
        self.caches[expected.worker].expected.remove(request_id)
        for depth in _depths(len(expected.hashes)):
            block = expected.hashes[depth - 1]
            probe = self._probes[block]
            requests = probe[expected.worker]
            del requests[request_id]
            if not requests:
                del probe[expected.worker]
            if not probe:
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
        self.turn = (self.turn + 1) % max(1, len(self.workers))
        return PrefixMatch(self, hashes, levels)

    def expecting(self, hashes: Sequence[int], limit: int) -> dict[WorkerKey, int]:
        """Up to `limit` workers to which prompts with the longest common prefixes are under way.

        Of each worker only its latest prompt at a depth counts; the prefix is exact, or up to half
        too short where an earlier one shares more.
        """
        found: dict[WorkerKey, int] = {}
        if not self._expected:
            return found
        for depth in reversed(_depths(len(hashes))):
            probe = self._probes.get(hashes[depth - 1])
            if probe is None:
                continue
            for worker in islice(reversed(probe), limit):
                if worker not in found:
                    found[worker] = self._common(probe[worker], hashes, depth)
            if len(found) >= limit:
                break
        return found

    def expected_of(self, cache: _Cache, hashes: Sequence[int], above: int) -> int:
        """Blocks of a prompt that this worker is expected to hold; 0 when not more than `above`."""
        for depth in reversed(_depths(len(hashes))):
            if 2 * depth <= above:
                break
            probe = self._probes.get(hashes[depth - 1])
            if probe is not None and (requests := probe.get(cache.worker)):
                return self._common(requests, hashes, depth)
        return 0

    def _common(self, requests: dict[str, None], hashes: Sequence[int], least: int) -> int:
        """How many first blocks the latest of these requests shares with a prompt, or `least`.

        Chained hashes are equal up to some block and never after it.
        """
        others = self._expected[next(reversed(requests))].hashes
        low, high = least, min(len(hashes), len(others), 2 * least)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] == others[middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def check_integrity(self) -> None:
        """Raises AssertionError when the masks and what each worker holds differ."""
        masks: dict[int, int] = {}
        for cache in self.caches.values():
            assert self.workers[cache.slot] == cache.worker
            assert len(cache.held) <= cache.max_blocks
            for block in cache.held:
                masks[block] = masks.get(block, 0) | 1 << cache.slot
        assert masks == self._blocks
        probed = set[str]()
        for probe in self._probes.values():
            for worker, requests in probe.items():
                assert requests
                assert all(self._expected[one].worker == worker for one in requests)
                probed.update(requests)
        expected = [one for cache in self.caches.values() for one in cache.expected]
        assert probed == set(expected) == self._expected.keys()
        assert len(expected) == len(set(expected))


def _depths(num_blocks: int) -> list[int]:
    """1, 2, 4, 8, ... up to `num_blocks`."""
    return [1 << power for power in range(num_blocks.bit_length())]
