"""Writing to a client that may have stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.runtime.errors import ResourceExhausted

# A client that reads nothing for this many seconds is considered gone.
STALLED_S = 60.0
# A write that takes this many seconds was delayed by the client.
SLOW_S = 0.1


def slow_reader() -> ResourceExhausted:
    """The error that ends a stream whose client does not read it."""
    return ResourceExhausted(
        "the client does not read its stream: too much output waits for it",
        reason="SLOW_READER",
        retry_after_s=None,
    )


class StallGuard:
    """Writes one message at a time, and detects a client that does not read.

    A write is never cancelled, because gRPC could not send the final status after it. Therefore the
    resources of a stalled call are freed at once, and the call itself ends only when the client
    reads again or disconnects.

    Args:
        context: Context of the call.
        on_stall: Called at most once, to free the resources of the call.
        stalled_s: Seconds without progress after which the client counts as stalled.
        on_slow: Called with start and end (by the loop's clock) of a write of SLOW_S or longer.
    """

    def __init__(
        self,
        context: Any,
        on_stall: Callable[[], None],
        stalled_s: float = STALLED_S,
        on_slow: Callable[[float, float], None] = lambda began_at, ended_at: None,
    ) -> None:
        self._on_slow = on_slow
        self._context, self._on_stall, self._stalled_s = context, on_stall, stalled_s
        self._loop = asyncio.get_running_loop()
        self._writing_since: float | None = None
        self._stalled = False
        self._timer = self._loop.call_later(stalled_s, self._check)

    async def write(self, message: object) -> None:
        """Writes a message; raises ResourceExhausted if the client stalled meanwhile."""
        self._writing_since = began_at = self._loop.time()
        await self._context.write(message)
        self._writing_since = None
        if (ended_at := self._loop.time()) - began_at >= SLOW_S:
            self._on_slow(began_at, ended_at)
        if self._stalled:
            raise slow_reader()

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        since = self._writing_since
        waited_s = self._loop.time() - since if since is not None else 0.0
        if waited_s >= self._stalled_s:
            self._stalled = True
            self._on_stall()
        else:
            self._timer = self._loop.call_later(self._stalled_s - waited_s, self._check)
