"""Writing to a client that may have stopped reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from baton.runtime.errors import ResourceExhausted

# A client that takes nothing at all for so long is gone in all but name.
STALLED_S = 60.0
# A write that takes so long waited for its reader.
SLOW_S = 0.1


def slow_reader() -> ResourceExhausted:
    """What ends a stream whose client does not read it."""
    return ResourceExhausted(
        "the client does not read its stream: too much output waits for it",
        reason="SLOW_READER",
        retry_after_s=None,
    )


class StallGuard:
    """Writes one message at a time, and notices one that nobody takes.

    A write is never cancelled: gRPC would refuse the status that should follow it. So what a
    stalled client holds is given up at once, and its call ends when it reads again or is gone.

    Args:
        context: of the call.
        on_stall: gives up what the call holds; called once at most.
        on_slow: told when a write began and ended that took SLOW_S or longer, by the loop's clock.
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
        """Raises ResourceExhausted when the client took it too late."""
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
