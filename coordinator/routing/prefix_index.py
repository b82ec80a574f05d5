"""Which worker holds which blocks of which prompts, so that a prompt can go where its prefix is.

Blocks are named by chained hashes (runtime/block_hashes.py). What workers report is exact; beside
it stands what the coordinator expects: a prompt that was dispatched to a worker and is not computed
yet will be there soon, which keeps a burst of equal prompts together.

Whoever holds a block is taken to hold those before it too, as every engine does that evicts a
prefix from its end: so depths are found by halving, not by walking. Where a cache has a hole all
the same, its worker counts as holding more than it does, and computes what it lacks: the whole
prompt, where a handoff has left out what was thought to be there.

Sets of workers are bit masks, one bit per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from baton.coordinator.state.requests import WorkerKey


@dataclass(slots=True, eq=False)
class _Cache:
    """One worker's part of the index.

    Attributes:
        held: reported hashes.
        expected: ids of the requests that are expected here.
    """

    worker: WorkerKey
    slot: int
    max_blocks: int
    held: set[int] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)


class _Expected(NamedTuple):
    worker: WorkerKey
    hashes: Sequence[int]


# Requests expected somewhere, by worker, each latest last.
_Probe: TypeAlias = dict[WorkerKey, dict[str, None]]


class PrefixMatch:
    """Who holds how much of one prompt; good until the index changes.

    Args:
        hashes: of the prompt.
        blocks, caches, workers, expected: the index's: masks by block; by worker; by slot; by
            request.
        probes: (num_blocks, requests by worker): prompts under way that share that many blocks or
            more; deeper ones later, each a subset of the one before.
        turn: the slot to begin with among equals.
    """

    __slots__ = (
        "_blocks",
        "_caches",
        "_expected",
        "_expecting",
        "_hashes",
        "_is_new",
        "_masks",
        "_probes",
        "_turn",
        "_workers",
    )

    def __init__(
        self,
        hashes: Sequence[int],
        blocks: dict[int, int],
        caches: dict[WorkerKey, _Cache],
        workers: list[WorkerKey | None],
        expected: dict[str, _Expected],
        probes: list[tuple[int, _Probe]],
        turn: int,
    ) -> None:
        self._hashes, self._blocks, self._caches = hashes, blocks, caches
        self._workers, self._expected, self._probes = workers, expected, probes
        self._turn = turn
        # Nobody has its first block, or soon will.
        self._is_new = not probes and not (len(hashes) and blocks.get(hashes[0]))
        # Looked up so far, by depth.
        self._masks: dict[int, int] = {}
        self._expecting: dict[WorkerKey, int] = {}

    def blocks_of(self, worker: WorkerKey) -> int:
        """How many of the prompt's first blocks this worker holds or soon will."""
        if self._is_new:
            return 0
        cache = self._caches.get(worker)
        if cache is None:
            return 0
        held = self._deepest(1 << cache.slot, len(self._hashes))
        for depth, probe in reversed(self._probes):
            if 2 * depth <= held:
                break
            if worker in probe:
                return max(held, self._common(probe[worker], depth))
        return held

    def longest(self, limit: int, among: int = -1) -> dict[WorkerKey, int]:
        """Up to `limit` workers with the longest prefixes, and how many blocks each has.

        Of more equals than fit, each query takes others than the last.

        Args:
            limit: at least 1.
            among: mask of the workers that count (PrefixIndex.bit).
        """
        if self._is_new:
            return {}
        found, turn, left = dict[WorkerKey, int](), self._turn, among
        num_blocks = len(self._hashes)
        while len(found) < limit and (num_blocks := self._deepest(left, num_blocks)):
            mask = self._masks[num_blocks] & left
            left ^= mask
            while mask and len(found) < limit:
                ahead = mask >> turn << turn or mask
                bit = ahead & -ahead
                mask ^= bit
                worker = self._workers[bit.bit_length() - 1]
                assert worker is not None
                found[worker] = num_blocks
            num_blocks -= 1
        for worker, num_blocks in self._expected_by_worker(limit).items():
            if found.get(worker, 0) < num_blocks and among >> self._caches[worker].slot & 1:
                found[worker] = num_blocks
        if len(found) <= limit:
            return found
        return dict(nlargest(limit, found.items(), key=itemgetter(1)))

    def _deepest(self, among: int, most: int) -> int:
        """How many blocks, at most `most`, the worker of `among` with the most of them holds."""
        hashes, blocks, masks = self._hashes, self._blocks, self._masks
        low, high, middle = 0, most, 1
        # Depths 1, 2, 4, ... until one that nobody holds, then halves between.
        doubling = True
        while low < high:
            mask = masks.get(middle, -1)
            if mask < 0:
                mask = masks[middle] = blocks.get(hashes[middle - 1], 0)
            if mask & among:
                low = middle
            else:
                high, doubling = middle - 1, False
            middle = min(2 * middle, high) if doubling else (low + high + 1) // 2
        return low

    def _expected_by_worker(self, limit: int) -> dict[WorkerKey, int]:
        """Of the workers that prompts with the longest common prefixes are on their way to."""
        found = self._expecting
        for depth, probe in reversed(self._probes):
            if len(found) >= limit:
                break
            for worker in islice(reversed(probe), limit):
                if worker not in found:
                    found[worker] = self._common(probe[worker], depth)
        return found

    def _common(self, requests: dict[str, None], least: int) -> int:
        """How many first blocks the latest of these requests shares with the prompt, or `least`.

        Only the latest: an earlier one may share up to twice as many. Chained hashes are equal up
        to some block and never after it.
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


class PrefixIndex:
    """Fed by workers' cache events; asked by the router.

    Memory is bounded by the workers' caches: of each at most as many blocks as it was added with
    are known, and what it reports beyond them is left out. An expectation lives as long as its
    request waits for its first token.
    """

    def __init__(self) -> None:
        self._caches: dict[WorkerKey, _Cache] = {}
        self._workers: list[WorkerKey | None] = []
        self._turn = 0
        self._free_slots: list[int] = []
        # Mask of the holders by block; never 0.
        self._blocks: dict[int, int] = {}
        self._expected: dict[str, _Expected] = {}
        # By the hashes of blocks 1, 2, 4, 8, ... of prompts: any two that share n blocks share the
        # largest of these that is at most n.
        self._probes: dict[int, _Probe] = {}
        # One prompt is asked for several times before anything changes: its hashes, the answer.
        self._latest: tuple[Sequence[int], PrefixMatch] | None = None

    @property
    def num_blocks(self) -> int:
        """Different blocks known."""
        return len(self._blocks)

    def add(self, worker: WorkerKey, max_blocks: int) -> None:
        """A worker that holds nothing yet, and never more than `max_blocks`."""
        assert worker not in self._caches
        self._latest = None
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
        self._latest = None
        held, blocks, bit = cache.held, self._blocks, 1 << cache.slot
        before, after = 0, bit
        for block in hashes:
            if block in held or len(held) == cache.max_blocks:
                continue
            held.add(block)
            mask = blocks.get(block, 0)
            # Neighbours with the same holders share one mask object, which saves memory.
            if mask is not before:
                before, after = mask, mask | bit
            blocks[block] = after

    def removed(self, worker: WorkerKey, hashes: Sequence[int]) -> None:
        cache = self._caches.get(worker)
        if cache is None:
            return
        self._latest = None
        held, blocks, bit = cache.held, self._blocks, 1 << cache.slot
        before, after = bit, 0
        for block in hashes:
            if block not in held:
                continue
            held.remove(block)
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
        self._latest = None
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
        self._latest = None
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
        self._latest = None
        self._caches[expected.worker].expected.remove(request_id)
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

        Asking costs a few look-ups for every doubling of the depth that somebody holds.

        Args:
            hashes: of the prompt; not to be changed afterwards.
        """
        if self._latest is not None and self._latest[0] is hashes:
            return self._latest[1]
        self._turn = (self._turn + 1) % max(1, len(self._workers))
        found = PrefixMatch(
            hashes,
            self._blocks,
            self._caches,
            self._workers,
            self._expected,
            self._probes_of(hashes),
            self._turn,
        )
        self._latest = hashes, found
        return found

    def _probes_of(self, hashes: Sequence[int]) -> list[tuple[int, _Probe]]:
        found = list[tuple[int, _Probe]]()
        for depth in _depths(len(hashes)):
            probe = self._probes.get(hashes[depth - 1])
            if probe is None:
                break
            found.append((depth, probe))
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
        probed = set[str]()
        for probe in self._probes.values():
            for worker, requests in probe.items():
                assert requests
                assert all(self._expected[one].worker == worker for one in requests)
                probed.update(requests)
        expected = [one for cache in self._caches.values() for one in cache.expected]
        assert probed == set(expected) == self._expected.keys()
        assert len(expected) == len(set(expected))


_POWERS = tuple(1 << power for power in range(64))


def _depths(num_blocks: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `num_blocks`."""
    return _POWERS[: num_blocks.bit_length()]
