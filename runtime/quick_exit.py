"""Ends of processes without what Python does last and nobody has anything of."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys


def skip_last_collection() -> None:
    """When this process ends it does not look through all its objects once more.

    That takes a command longer than to end otherwise; what holds nothing but memory may go with it.
    """
    atexit.register(gc.freeze)


def skip_cleanup(exit_code: int) -> None:
    """When this process ends it does so at once, with this code.

    Freeing all that vLLM has imported takes Python seconds in each process, of which nobody has
    anything: the kernel does it. What this process holds elsewhere must be freed by now; what is
    registered with atexit before this call does not run.
    """
    atexit.register(_exit, exit_code)


def _exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        # Closed, or with nobody who reads it.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
