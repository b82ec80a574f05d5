"""Process start, signals and garbage collection."""

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

from baton.runtime.counted import counted
from baton.runtime.process import main_coroutine, output_streams, quick_start


class SignalReceived(BaseException):
    """Raised by SIGINT or SIGTERM inside `interruptible`."""


def process_started_at() -> float:
    """Start time of this process on the time.monotonic clock, in steps of 1/100 s.

    The wall clock is not used, because /proc gives the host's boot time in whole seconds only.
    """
    # Field 22 is the start time; the fields after the program's name (may have spaces) start at 3.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot_s)


def run(main: Coroutine[Any, Any, int]) -> int:
    """Runs a process's main coroutine on uvloop and returns its exit code.

    It raises the limit of open files to the allowed maximum, because each connection is one file.
    At the end it flushes the output, so that the traceback of an exception comes last.
    """
    with main_coroutine.closed_if_unstarted(main):
        quick_start.collect_as_usual()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            return int(main_coroutine.run(main, uvloop.new_event_loop))
        finally:
            output_streams.flush()


@contextlib.asynccontextmanager
async def frozen_heap() -> AsyncIterator[None]:
    """Excludes existing objects, which live as long as the process, from garbage collections.

    Collections over them would interrupt the process's streams.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disables garbage collection, which takes a sixth of the time of large imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def stop_requested(before_exit: Callable[[], None] = lambda: None) -> asyncio.Event:
    """Returns an event that SIGINT and SIGTERM set; a second signal ends the process at once.

    Call once, in the running loop of the process's main coroutine.

    Args:
        before_exit: Called before a second signal ends the process; must be quick.
    """
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    came = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal came
        # `event` is not checked, because other code may set it too.
        if came:
            loop.remove_signal_handler(number)
            before_exit()
            # The default action ends the process without cleanup. Python's handler for SIGINT would
            # raise an exception and clean up first, too slow for a user who presses Ctrl-C twice.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Reached in the first process of a container, for which the kernel ignores signals
            # without a handler.
            os._exit(128 + number)
        came = True
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return event


def draining(num_requests: int, timeout_s: float) -> str:
    """The log line of a process that waits for its running requests before it ends."""
    return (
        f"draining: waiting at most {timeout_s:g} s for {counted(num_requests, 'request')}; "
        "a second Ctrl-C or SIGTERM ends the process at once"
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Interrupts a long synchronous call, such as an import, at SIGINT or SIGTERM.

    The call raises SignalReceived. The event loop calls its signal handlers only when the call has
    returned; Python's handlers run during the call. Both run: the event of `stop_requested` is set
    in the loop's next round.
    """
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        restore()
        raise SignalReceived

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number)
            signal.signal(number, on_signal)
        yield
    finally:
        restore()
