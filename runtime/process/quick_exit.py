"""Faster exits: skip the cleanup that Python does at the end of a process."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from baton.runtime.process import output_streams

_INTERRUPTED = 130


def skip_final_gc() -> None:
    """Skips the garbage collection at the end of this process.

    For a command, that collection takes longer than the rest of its exit. Only memory may be
    released this way: finalizers of remaining objects do not run.
    """
    atexit.register(gc.freeze)


def skip_cleanup(exit_code: int) -> None:
    """Ends this process with `exit_code` without Python's cleanup, when the interpreter exits.

    Freeing the objects of all modules that vLLM imports takes seconds per process, although the
    kernel frees the memory anyway. Other resources of this process must be released before;
    functions that were registered with atexit before this call do not run. After several calls the
    exit code of the last one counts.
    """
    atexit.register(_exit, exit_code)


@contextlib.contextmanager
def skip_cleanup_if_interrupted() -> Iterator[None]:
    """Makes Ctrl-C inside end this process without Python's cleanup; usable as a decorator.

    For code that imports vLLM: one of its libraries prints a page about its own objects during the
    cleanup. The exit code is 130.
    """
    try:
        yield
    except KeyboardInterrupt:
        skip_cleanup(_INTERRUPTED)
        raise


def _exit(code: int) -> None:
    output_streams.flush()
    # Contrary to their declared types, they are None if they were closed before the start.
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    for stream in streams:
        # The stream may be closed, or its reader may have ended.
        with contextlib.suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
    os._exit(code)
