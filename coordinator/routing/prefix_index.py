"""Index of the KV blocks in each worker's prefix cache, used to route a prompt to its prefix.

Blocks are identified by chained hashes (runtime/block_hashes.py). The index has two sources: the
workers' cache reports, which are exact, and the coordinator's expectations. A prompt that was sent
to a worker and is not computed yet is expected to be in its cache soon; this keeps a burst of equal
prompts together.

The index assumes that a worker with a block also holds all earlier blocks of the prompt, which is
true for engines that evict a prefix from its end. Therefore prefix lengths are found by binary
search. If a cache has a gap nevertheless, the index overestimates the worker, and the worker
computes the missing blocks; after a handoff that left these blocks out, it computes the whole
prompt.

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
        slot: index of the worker's bit in bit masks.
        max_blocks: maximum number of blocks indexed for the worker.
        held: hashes that the worker has reported.
        expected: IDs of the requests whose prompts are expected in the cache.
    """

    worker: WorkerKey
    slot: int
    max_blocks: int
    held: set[int] = field(default_factory=set)
    expected: set[str] = field(default_factory=set)


class _Expected(NamedTuple):
    worker: WorkerKey
    hashes: Sequence[int]


# Expected requests by worker; workers and requests are each ordered by time, the latest last.
_Probe: TypeAlias = dict[WorkerKey, dict[str, None]]


class PrefixMatch:
    """The prefix of one prompt that each worker holds; valid until the index changes.

    Args:
        hashes: Block hashes of the prompt.
        blocks: The index's worker masks by block hash.
        caches: The index's caches by worker.
        workers: The index's workers by slot.
        expected: The index's expected prompts by request ID.
        probes: Pairs (num_blocks, requests by worker): expected prompts that share at least
            num_blocks blocks, in ascending order; each is a subset of the previous one.
        turn: Slot that comes first among workers with equally long prefixes.
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
        # No worker holds the prompt's first block or is expected to hold it soon.
        self._is_new = not probes and not (len(hashes) and blocks.get(hashes[0]))
        # Results of look-ups so far, by number of blocks.
        self._masks: dict[int, int] = {}
        self._expecting: dict[WorkerKey, int] = {}

    def blocks_of(self, worker: WorkerKey) -> int:
        """Number of the prompt's first blocks that a worker holds or is expected to hold soon."""
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
        """Up to `limit` workers with the longest prefixes, with the number of blocks of each.

        If more workers with equal prefixes exist than fit, queries take turns among them.

        Args:
            limit: maximum number of workers; at least 1.
            among: mask of the workers to consider (PrefixIndex.bit).
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
        """Longest prefix, in blocks and at most `most`, that any worker in `among` holds."""
        hashes, blocks, masks = self._hashes, self._blocks, self._masks
        low, high, middle = 0, most, 1
        # Tries 1, 2, 4, ... blocks until no worker holds that many, then does a binary search.
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
        """Expected prefix blocks of the workers to which the most similar prompts were sent."""
        found = self._expecting
        for depth, probe in reversed(self._probes):
            if len(found) >= limit:
                break
            for worker in islice(reversed(probe), limit):
                if worker not in found:
                    found[worker] = self._common(probe[worker], depth)
        return found

    def _common(self, requests: dict[str, None], least: int) -> int:
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


class PrefixIndex:
    """Prefix index, updated with the workers' cache events and queried by the router.

    Memory is bounded: at most `max_blocks` blocks are indexed per worker, and blocks reported
    beyond that are ignored. An expectation lasts until its request has a first token.
    """

    def __init__(self) -> None:
        self._caches: dict[WorkerKey, _Cache] = {}
        self._workers: list[WorkerKey | None] = []
        self._turn = 0
        self._free_slots: list[int] = []
        # Mask of the workers that hold a block, by block hash; never 0.
        self._blocks: dict[int, int] = {}
        self._expected: dict[str, _Expected] = {}
        # Expected requests by the hashes of blocks 1, 2, 4, 8, ... of their prompts. Two prompts
        # that share n blocks also share the largest power of two that is at most n.
        self._probes: dict[int, _Probe] = {}
        # Cached latest query (hashes, result): a prompt is looked up several times in a row.
        self._latest: tuple[Sequence[int], PrefixMatch] | None = None

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks in the index."""
        return len(self._blocks)

    def add(self, worker: WorkerKey, max_blocks: int) -> None:
        """Adds a worker with an empty cache of at most `max_blocks` blocks."""
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

    # ---- Cache events; events of unknown workers are ignored.

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
        """Removes all blocks that a worker has reported."""
        if worker in self._caches:
            self.removed(worker, list(self._caches[worker].held))

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker and the expectations for its cache."""
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
        """Records that a worker's cache will soon hold a prompt. Costs O(log blocks)."""
        assert request_id not in self._expected
        cache = self._caches.get(worker)
        if cache is None or not hashes:
            return
        self._latest = None
        cache.expected.add(request_id)
        self._expected[request_id] = _Expected(worker, hashes)
        for depth in _depths(len(hashes)):
            probe = self._probes.setdefault(hashes[depth - 1], {})
            # pop() and re-insertion move the worker to the end.
            probe[worker] = requests = probe.pop(worker, {})
            requests[request_id] = None

    def settle(self, request_id: str) -> None:
        """Ends an expectation: the prompt is computed or never will be.

        From now on only the worker's cache reports count.
        """
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
        """The number of a prompt's first blocks that each worker holds.

        A query costs O(log n) look-ups for a longest prefix of n blocks.

        Args:
            hashes: block hashes of the prompt; the caller must not change them afterwards.
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
        """Raises AssertionError if the masks differ from the workers' caches."""
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
