"""Tasks that run as long as their owner: an error in one must not go unnoticed until the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

_log = logging.getLogger(__name__)

# Pause before a failed task runs again, in seconds; it doubles with each failure in a row.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0


async def keep_running(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs `run` until it returns; logs an error and runs it again after a pause.

    For tasks that a process can do without for a while. Errors of other tasks end the process.

    Args:
        what: Name of the task in the log.
        run: Called for each attempt; must not depend on how an earlier attempt ended.
    """
    pause_s = _FIRST_PAUSE_S
    while True:
        began_at = monotonic()
        try:
            await run()
            return
        except Exception:
            if monotonic() - began_at > _MAX_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            _log.exception("%s failed; it runs again in %g s", what, pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(_MAX_PAUSE_S, 2 * pause_s)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Callback of a task that is awaited only at the end: logs its error at once."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the task %r failed", task.get_name(), exc_info=error)
