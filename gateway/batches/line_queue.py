"""The lines of one batch that have no result yet, in the order in which they start."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable

from baton.gateway.batches.batch_store import Line
from baton.gateway.batches.pace import Pace


class LineQueue:
    """Gives out each line once, and again after a refusal.

    Every line that `get` returns must be reported to `done` or `refused`.

    Args:
        fetch: Returns the next lines after a line number; an empty list after the last one.
        max_running: Largest number of lines that are out at a time.
    """

    def __init__(self, fetch: Callable[[int], Awaitable[list[Line]]], max_running: int) -> None:
        self._fetch, self._pace = fetch, Pace(max_running)
        self._waiting: deque[Line] = deque()
        self._last_number, self._has_more = 0, True
        self._num_running = 0
        self._changed = asyncio.Event()

    async def get(self) -> Line | None:
        """Waits until the next line may start; returns None when all lines are done."""
        loop = asyncio.get_running_loop()
        while self._waiting or self._has_more or self._num_running:
            if not self._waiting and self._has_more:
                found = await self._fetch(self._last_number)
                self._has_more = bool(found)
                if found:
                    self._last_number = found[-1].number
                    self._waiting += found
                continue
            self._changed.clear()
            wait_s = math.inf
            if self._waiting:
                wait_s = self._pace.wait_s(loop.time(), self._num_running)
            if not wait_s:
                self._num_running += 1
                return self._waiting.popleft()
            try:
                async with asyncio.timeout(wait_s if wait_s < math.inf else None):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return None

    def done(self) -> None:
        """A line has its result."""
        self._num_running -= 1
        self._pace.finished()
        self._changed.set()

    def refused(self, line: Line, retry_after_s: float) -> None:
        """A line was refused, and goes before the others after this time."""
        self._num_running -= 1
        self._waiting.appendleft(line)
        self._pace.refused(asyncio.get_running_loop().time(), retry_after_s)
        self._changed.set()
