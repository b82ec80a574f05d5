"""Reports net changes of one tier of this worker's KV blocks to the coordinator, in batches."""

from __future__ import annotations

from collections.abc import Sequence

from baton.kvtransfer.block_changes import CacheChange
from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox

MAX_HASHES_PER_MESSAGE = 16384
# Number of pending changes at which a message is posted. A decode step changes only few blocks,
# which are not worth a message of their own.
_POST_AT_CHANGES = 256


class CacheReports:
    """Collects the changes of one tier and posts them as CacheEvents.

    Memory is bounded by the size of the tier.

    Args:
        outbox: Keeps the messages until they are acknowledged.
        tier: Where the engine keeps the blocks.

    Attributes:
        num_removed: Number of blocks that the tier has lost since the start: evicted, or deleted.
    """

    def __init__(
        self,
        outbox: Outbox,
        tier: cluster_pb2.CacheTier.ValueType = cluster_pb2.CACHE_TIER_UNSPECIFIED,
    ) -> None:
        self._outbox, self._tier = outbox, tier
        # All blocks that the tier holds, and the blocks that the coordinator knows, both in the
        # order of storing; then the changes that are not reported yet: stored and removed blocks.
        self._held: dict[int, None] = {}
        self._reported: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._reset = False
        self.num_removed = 0

    def __len__(self) -> int:
        """Number of blocks that the tier holds."""
        return len(self._held)

    def take(self, change: CacheChange) -> None:
        """Adds the changes of one step; posts a message if many changes are pending."""
        if change.cleared:
            self.num_removed += len(self._held)
            self._clear()
        for block in change.removed:
            self.num_removed += block in self._held
            self._held.pop(block, None)
            self._stored.pop(block, None)
            if block in self._reported:
                self._removed[block] = None
        for block in change.stored:
            self._held.pop(block, None)
            self._held[block] = None
            if block in self._reported:
                self._removed.pop(block, None)
            else:
                self._stored[block] = None
        if len(self._stored) + len(self._removed) >= _POST_AT_CHANGES:
            self.flush()

    def flush(self) -> None:
        """Posts the pending changes, if any."""
        stored, removed, reset = list(self._stored), list(self._removed), self._reset
        self._stored, self._removed, self._reset = {}, {}, False
        for block in removed:
            del self._reported[block]
        self._reported.update(dict.fromkeys(stored))
        while stored or removed or reset:
            events = cluster_pb2.CacheEvents(
                reset=reset, removed=_cut(removed, MAX_HASHES_PER_MESSAGE), tier=self._tier
            )
            if not removed:
                events.stored.extend(_cut(stored, MAX_HASHES_PER_MESSAGE - len(events.removed)))
            self._outbox.post(cluster_pb2.WorkerMessage(cache=events))
            reset = False

    def report_all(self) -> None:
        """Posts all blocks of the tier, for a coordinator that does not know any of them."""
        held = self._held
        self._clear()
        self._held = held
        self._stored = dict(held)
        self.flush()

    def _clear(self) -> None:
        self._held, self._reported, self._stored, self._removed = {}, {}, {}, {}
        self._reset = True


def _cut(hashes: list[int], count: int) -> Sequence[int]:
    """Removes and returns the first `count` hashes of a list."""
    first = hashes[:count]
    del hashes[:count]
    return first
