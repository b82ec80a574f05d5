"""What the coordinator is told of this worker's prefix cache: net changes, a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.base import CacheChange
from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox

MAX_HASHES_PER_MESSAGE = 16384
# A decode step fills a block now and then: not worth a message of its own.
_MANY = 256


class CacheReports:
    """Collects an engine's cache changes and posts them as CacheEvents.

    Memory is bounded by the engine's cache: what it holds, and what of that is not told yet.

    Args:
        outbox: keeps the messages until they are acknowledged.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        # What the cache holds, and what of it the coordinator knows, in the order of storing; then
        # what is to be told.
        self._held: dict[int, None] = {}
        self._told: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._reset = False

    def take(self, change: CacheChange) -> None:
        """Takes in what one step changed; posts when that makes many."""
        if change.cleared:
            self._forget_all()
        for block in change.removed:
            self._held.pop(block, None)
            self._stored.pop(block, None)
            if block in self._told:
                self._removed[block] = None
        for block in change.stored:
            self._held.pop(block, None)
            self._held[block] = None
            if block in self._told:
                self._removed.pop(block, None)
            else:
                self._stored[block] = None
        if len(self._stored) + len(self._removed) >= _MANY:
            self.flush()

    def flush(self) -> None:
        """Posts what has changed since the last time, if anything."""
        stored, removed, reset = list(self._stored), list(self._removed), self._reset
        self._stored, self._removed, self._reset = {}, {}, False
        for block in removed:
            del self._told[block]
        self._told.update(dict.fromkeys(stored))
        while stored or removed or reset:
            events = cluster_pb2.CacheEvents(
                reset=reset, removed=_cut(removed, MAX_HASHES_PER_MESSAGE)
            )
            if not removed:
                events.stored.extend(_cut(stored, MAX_HASHES_PER_MESSAGE - len(events.removed)))
            self._outbox.post(cluster_pb2.WorkerMessage(cache=events))
            reset = False

    def tell_all(self) -> None:
        """Posts everything: a coordinator that knows nothing has welcomed this worker."""
        held = self._held
        self._forget_all()
        self._held = held
        self._stored = dict(held)
        self.flush()

    def _forget_all(self) -> None:
        self._held, self._told, self._stored, self._removed = {}, {}, {}, {}
        self._reset = True


def _cut(hashes: list[int], count: int) -> Sequence[int]:
    """Takes the first `count` out of a list."""
    first = hashes[:count]
    del hashes[:count]
    return first
