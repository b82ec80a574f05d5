"""How many lines of a batch may run, and how callers share the lines that run."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque


class Pace:
    """Limit of a batch's running lines of one model, which follows the coordinator's refusals.

    A refusal pauses these lines for the time that the coordinator says, and halves the limit, at
    most once per pause. Each finished line raises it by one, as TCP does after a loss (RFC 5681).

    Args:
        max_running: Largest limit.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = self._limit = max_running
        self._paused_until = -math.inf

    def wait_s(self, now: float, num_running: int) -> float:
        """Seconds until the next line may start; infinity: not before a running line ends."""
        if now < self._paused_until:
            return self._paused_until - now
        return 0.0 if num_running < self._limit else math.inf

    def refused(self, now: float, retry_after_s: float) -> None:
        """A line was refused and may be submitted again after this time."""
        if now >= self._paused_until:
            self._limit = max(1, self._limit // 2)
        self._paused_until = max(self._paused_until, now + retry_after_s)

    def finished(self) -> None:
        """A line has its result."""
        self._limit = min(self._max_running, self._limit + 1)


class FairSlots:
    """Lines that run at the same time. A free slot goes to the caller with the fewest.

    Args:
        num_slots: Number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._held: Counter[bytes] = Counter()
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}

    @property
    def num_held(self) -> int:
        return sum(self._held.values())

    async def take(self, owner: bytes) -> None:
        """Waits for a slot."""
        if self._num_free:
            self._num_free -= 1
            self._held[owner] += 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.give_back(owner)
            raise

    def give_back(self, owner: bytes) -> None:
        """Frees a slot of a caller."""
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        while self._waiting:
            least = min(self._waiting, key=self._held.__getitem__)
            queue = self._waiting[least]
            slot = queue.popleft()
            if not queue:
                del self._waiting[least]
            if not slot.done():
                self._held[least] += 1
                slot.set_result(None)
                return
        self._num_free += 1
