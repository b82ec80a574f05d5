"""How a process runs and how it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import uvloop


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a process's main coroutine on uvloop and returns its exit code.

    With as many open files as it may have: each connection is one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return int(uvloop.run(main))


@contextlib.asynccontextmanager
async def settled_heap() -> AsyncIterator[None]:
    """Collections leave alone what was there before, and lives as long as the process.

    They would be pauses of its streams.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def stop_requested() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set; a second signal ends the process at once.

    Call once, in the running loop of the process's main coroutine.
    """
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return event
