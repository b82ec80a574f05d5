"""Index of the KV blocks that each worker holds, used to route a prompt to its prefix.

Blocks are identified by chained hashes (runtime/prompts/block_hashes.py). A worker holds blocks in
three
tiers: its engine's prefix cache on the device, and its KV store in host memory and on disk. The
index has two sources: the workers' reports, which are exact, and the coordinator's expectations. A
prompt that was sent to a worker and is not computed yet is expected to be in its prefix cache soon;
this keeps a burst of equal prompts together.

The index assumes that a worker with a block on its device also holds all earlier blocks of the
prompt there, which is true for engines that evict a prefix from its end. Therefore prefix lengths
are found by binary search. If a cache has a gap nevertheless, the index overestimates the worker,
and the worker computes the missing blocks; after a handoff that left these blocks out, it computes
the whole prompt. Host memory and the disk may have gaps (prefix_match.py).

Sets of workers are bit masks, one bit per worker. The bit of a lost worker is used again when its
blocks have left the masks, which happens in steps (tier_index.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from baton.coordinator.routing.prefixes.prefix_match import Expected, PrefixMatch, Probe
from baton.coordinator.routing.prefixes.tier_index import TierIndex
from baton.coordinator.state.requests import RequestKey, WorkerKey

# Number of lost blocks that are removed in one go; this takes about 1 ms.
_TIDIED_AT_ONCE = 1024
# Number of lost blocks that are removed per second, beside as many as are stored.
_TIDIED_PER_S = 200_000


class Tier(Enum):
    """Where a worker keeps KV blocks."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class PrefixIndex:
    """Prefix index, updated with the workers' cache events and queried for placements.

    Memory is bounded by the sizes of the workers' tiers. An expectation lasts until its request
    has a first token.
    """

    def __init__(self) -> None:
        # Keys of the requests whose prompts are expected in a worker's cache.
        self._expected_at: dict[WorkerKey, set[RequestKey]] = {}
        # A worker's slot is the index of its bit in masks.
        self._slots: dict[WorkerKey, int] = {}
        self._workers: list[WorkerKey | None] = []
        self._turn = 0
        self._free_slots: list[int] = []
        # Slots of forgotten workers whose bits are still in masks.
        self._leaving_slots: list[int] = []
        self._is_tidy, self._tidied_at = True, 0.0
        self._tiers = {tier: TierIndex() for tier in Tier}
        self._expected: dict[RequestKey, Expected] = {}
        # Expected requests by the hashes of blocks 1, 2, 4, 8, ... of their prompts. Two prompts
        # that share n blocks also share the largest power of two that is at most n.
        self._probes: dict[int, Probe] = {}
        # Cached latest query (hashes, result): a prompt is looked up several times in a row.
        self._latest: tuple[Sequence[int], PrefixMatch] | None = None

    def add(
        self,
        worker: WorkerKey,
        max_blocks: int,
        max_host_blocks: int = 0,
        max_disk_blocks: int = 0,
    ) -> None:
        """Adds a worker without blocks.

        Args:
            worker: the worker.
            max_blocks: size of its prefix cache.
            max_host_blocks: size of its KV store in host memory; 0: none.
            max_disk_blocks: size of its KV store on disk; 0: none.
        """
        assert worker not in self._slots
        self._latest = None
        if self._free_slots:
            slot = self._free_slots.pop()
            self._workers[slot] = worker
        else:
            slot = len(self._workers)
            self._workers.append(worker)
        self._slots[worker], self._expected_at[worker] = slot, set()
        self._tiers[Tier.DEVICE].add(worker, 1 << slot, max_blocks)
        self._tiers[Tier.HOST].add(worker, 1 << slot, max_host_blocks)
        self._tiers[Tier.DISK].add(worker, 1 << slot, max_disk_blocks)

    def bit(self, worker: WorkerKey) -> int:
        """The worker's mask; it stays the same until `forget`."""
        return 1 << self._slots[worker]

    # ---- Cache events; events of unknown workers are ignored.

    def stored(self, worker: WorkerKey, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        self._latest = None
        self._tiers[tier].stored(worker, hashes)
        # Lost blocks never become more than blocks that workers hold.
        self._tidy(len(hashes))

    def removed(self, worker: WorkerKey, hashes: Sequence[int], tier: Tier = Tier.DEVICE) -> None:
        self._latest = None
        self._tiers[tier].removed(worker, hashes)

    def cleared(self, worker: WorkerKey, tier: Tier = Tier.DEVICE) -> None:
        """Removes all blocks that a worker has reported for a tier."""
        self._latest = None
        self._tiers[tier].cleared(worker)
        self._is_tidy = False
        self._tidy(_TIDIED_AT_ONCE)

    def forget(self, worker: WorkerKey) -> None:
        """Removes a worker and the expectations for its cache."""
        if worker not in self._slots:
            return
        for request in list(self._expected_at[worker]):
            self.settle(request)
        self._latest = None
        for index in self._tiers.values():
            index.forget(worker)
        del self._expected_at[worker]
        slot = self._slots.pop(worker)
        self._workers[slot] = None
        self._leaving_slots.append(slot)
        self._is_tidy = False
        self._tidy(_TIDIED_AT_ONCE)

    def tidy(self, now: float) -> None:
        """Removes some of the lost blocks from memory; called often. No query tells the difference.

        Args:
            now: time by the core's clock.
        """
        elapsed_s, self._tidied_at = now - self._tidied_at, now
        self._tidy(min(_TIDIED_AT_ONCE, int(elapsed_s * _TIDIED_PER_S)))

    def _tidy(self, num_blocks: int) -> None:
        if self._is_tidy or not num_blocks:
            return
        num_stale = sum(index.num_stale for index in self._tiers.values())
        for index in self._tiers.values():
            num_blocks = index.tidy(num_blocks)
        if num_stale and num_stale == sum(index.num_stale for index in self._tiers.values()):
            return
        for slot in list(self._leaving_slots):
            if all(index.is_free(1 << slot) for index in self._tiers.values()):
                self._leaving_slots.remove(slot)
                self._free_slots.append(slot)
        self._is_tidy = not any(index.num_stale for index in self._tiers.values())

    # ---- Expectations.

    def expect(self, request: RequestKey, worker: WorkerKey, hashes: Sequence[int]) -> None:
        """Records that a worker's cache will soon hold a prompt. Costs O(log blocks)."""
        assert request not in self._expected
        if worker not in self._slots or not hashes:
            return
        self._latest = None
        self._expected_at[worker].add(request)
        self._expected[request] = Expected(worker, hashes)
        for depth in _depths(len(hashes)):
            probe = self._probes.setdefault(hashes[depth - 1], {})
            # pop() and re-insertion move the worker to the end.
            probe[worker] = requests = probe.pop(worker, {})
            requests[request] = None

    def settle(self, request: RequestKey) -> None:
        """Ends an expectation: the prompt is computed or never will be.

        From now on only the worker's cache reports count.
        """
        expected = self._expected.pop(request, None)
        if expected is None:
            return
        self._latest = None
        self._expected_at[expected.worker].remove(request)
        for depth in _depths(len(expected.hashes)):
            block = expected.hashes[depth - 1]
            probe = self._probes[block]
            requests = probe[expected.worker]
            del requests[request]
            if not requests:
                del probe[expected.worker]
            if not probe:
                del self._probes[block]

    # ---- Queries.

    def match(self, hashes: Sequence[int]) -> PrefixMatch:
        """The prefix of a prompt that each worker holds, by tier.

        A query costs O(log n) look-ups for a longest prefix of n blocks on the device. The first
        query across tiers looks up the prompt's blocks, at most MAX_TESTED_BLOCKS.

        Args:
            hashes: block hashes of the prompt; the caller must not change them afterwards.
        """
        if self._latest is not None and self._latest[0] is hashes:
            return self._latest[1]
        self._turn = (self._turn + 1) % max(1, len(self._workers))
        found = PrefixMatch(
            hashes,
            self._tiers[Tier.DEVICE].masks,
            self._tiers[Tier.HOST].masks,
            self._tiers[Tier.DISK].masks,
            self._slots,
            self._workers,
            self._expected,
            self._probes_of(hashes),
            self._turn,
        )
        self._latest = hashes, found
        return found

    def _probes_of(self, hashes: Sequence[int]) -> list[tuple[int, Probe]]:
        found = list[tuple[int, Probe]]()
        for depth in _depths(len(hashes)):
            probe = self._probes.get(hashes[depth - 1])
            if probe is None:
                break
            found.append((depth, probe))
        return found

    def check_integrity(self) -> None:
        """Raises AssertionError if the masks differ from the workers' blocks."""
        for worker, slot in self._slots.items():
            assert self._workers[slot] == worker
        slots = [*self._slots.values(), *self._free_slots, *self._leaving_slots]
        assert sorted(slots) == list(range(len(self._workers)))
        assert not self._is_tidy or not self._leaving_slots
        bits = {worker: 1 << slot for worker, slot in self._slots.items()}
        for index in self._tiers.values():
            index.check_integrity(bits)
        probed = set[RequestKey]()
        for probe in self._probes.values():
            for worker, requests in probe.items():
                assert requests
                assert all(self._expected[one].worker == worker for one in requests)
                probed.update(requests)
        expected = [one for requests in self._expected_at.values() for one in requests]
        assert probed == set(expected) == self._expected.keys()
        assert len(expected) == len(set(expected))


_POWERS = tuple(1 << power for power in range(64))


def _depths(num_blocks: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... up to `num_blocks`."""
    return _POWERS[: num_blocks.bit_length()]
