"""The lines of one batch that have no result yet, in the order in which they start."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from baton.gateway.batches.batch_store import Line
from baton.gateway.batches.pace import Pace

# At this number of refused lines of a model, the queue reads no further lines of this model.
_MAX_REFUSED = 16


class LineQueue:
    """Gives out each line once, and again after a refusal.

    Each model has a pace of its own and the models take turns, so that the lines of a model that no
    cell serves now do not keep the others waiting. Every line that `get` returns must be reported
    to `done` or `refused`.

    Args:
        fetch: Returns the next lines of a model after a line number; an empty list after the last.
        model_numbers: `Line.model_number` of the lines.
        max_running: Largest number of lines of a model that are out at a time.
    """

    def __init__(
        self,
        fetch: Callable[[int, int], Awaitable[list[Line]]],
        model_numbers: Iterable[int],
        max_running: int,
    ) -> None:
        self._fetch = fetch
        # The model of the next line is first.
        self._models = {number: _ModelLines(max_running) for number in model_numbers}
        self._changed = asyncio.Event()

    async def get(self) -> Line | None:
        """Waits until the next line may start; returns None when all lines are done."""
        loop = asyncio.get_running_loop()
        while any(model.has_work for model in self._models.values()):
            self._changed.clear()
            now = loop.time()
            waits_s = {number: model.wait_s(now) for number, model in self._models.items()}
            number = min(waits_s, key=waits_s.__getitem__)
            wait_s, model = waits_s[number], self._models[number]
            if wait_s:
                try:
                    async with asyncio.timeout(wait_s if wait_s < math.inf else None):
                        await self._changed.wait()
                except TimeoutError:
                    pass
            elif model.needs_lines:
                model.add(await self._fetch(number, model.last_number))
            else:
                self._models[number] = self._models.pop(number)
                return model.take()
        return None

    def done(self, line: Line) -> None:
        """A line has its result."""
        self._models[line.model_number].done()
        self._changed.set()

    def refused(self, line: Line, retry_after_s: float) -> None:
        """A line was refused, and runs again, but not before this time."""
        now = asyncio.get_running_loop().time()
        self._models[line.model_number].refused(line, now, retry_after_s)
        self._changed.set()


class _ModelLines:
    """The lines of one model.

    Refused lines run after the others, but before unread lines if _MAX_REFUSED of them wait.

    Attributes:
        last_number: Number of the last line that was added.
    """

    def __init__(self, max_running: int) -> None:
        self._pace = Pace(max_running)
        self._new, self._refused = deque[Line](), deque[Line]()
        self._has_more, self._num_running = True, 0
        self.last_number = 0

    @property
    def has_work(self) -> bool:
        """Whether lines have no result."""
        return bool(self._new or self._refused or self._has_more or self._num_running)

    @property
    def needs_lines(self) -> bool:
        """Whether further lines must be added before one is taken."""
        return not self._new and self._has_more and len(self._refused) < _MAX_REFUSED

    def wait_s(self, now: float) -> float:
        """Seconds until the next line may start; infinity: not before a running line ends."""
        if self._new or self._refused or self._has_more:
            return self._pace.wait_s(now, self._num_running)
        return math.inf

    def add(self, lines: list[Line]) -> None:
        """Adds the lines after `last_number`; none: there are no more."""
        self._new += lines
        self._has_more = bool(lines)
        if lines:
            self.last_number = lines[-1].number

    def take(self) -> Line:
        self._num_running += 1
        return (self._new or self._refused).popleft()

    def done(self) -> None:
        self._num_running -= 1
        self._pace.finished()

    def refused(self, line: Line, now: float, retry_after_s: float) -> None:
        self._num_running -= 1
        self._refused.append(line)
        self._pace.refused(now, retry_after_s)
