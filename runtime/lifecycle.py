"""How a process runs and how it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvloop


class SignalCame(BaseException):
    """SIGINT or SIGTERM, where `cut_short` is waiting for it."""


def begun_at() -> float:
    """When this process began, in seconds by time.monotonic; the kernel counts in hundredths.

    Not by the wall clock: what it said when the host was booted is known in whole seconds only.
    """
    # What begins behind the program's name, which may have spaces: field 22 is the start.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collections meanwhile: while much is imported they take a sixth of the time in vain."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def stop_requested(last_words: Callable[[], None] = lambda: None) -> asyncio.Event:
    """An event that SIGINT and SIGTERM set; a second signal ends the process at once.

    Call once, in the running loop of the process's main coroutine.

    Args:
        last_words: called before a second signal ends it; must be quick.
    """
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    came = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal came
        # Others may have set the event: that is not a first signal.
        if came:
            loop.remove_signal_handler(number)
            last_words()
            # The kernel's own way: of Python's, SIGINT is an exception, and everything would still
            # be cleaned up, which is what whoever sends a second one no longer waits for.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still here: the kernel spares the first process of a container what it has no handler
            # for.
            os._exit(128 + number)
        came = True
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return event


@contextlib.contextmanager
def cut_short() -> Iterator[None]:
    """What holds up the loop, a long import say, ends with SignalCame at SIGINT and SIGTERM.

    A loop calls its handlers when it goes on, and Python's own are called in the midst of what
    runs. Both are: `stop_requested`'s event is set in the loop's next round.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        restore()
        raise SignalCame

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, on_signal)
        yield
    finally:
        restore()
