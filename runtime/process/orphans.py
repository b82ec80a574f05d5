"""Ends child processes when their parent ends for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, how: signal.Signals = signal.SIGTERM) -> None:
    """Asks the kernel to send a signal to this process when its parent dies; survives an exec.

    It works on Linux only. The kernel means the thread that started this process, so that thread
    must live as long as its process.

    Args:
        parent_pid: Process ID of the parent at the start of this process. If that parent has
            already ended, this process exits at once.
        how: Signal to send; SIGKILL when other code handles SIGTERM.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent_pid:
        sys.exit(1)


class EndsWithParent:
    """Kills a spawned child process when its parent dies; pass an instance among its arguments.

    It is meant for children that run a library's code: arguments are unpickled before that starts.
    """

    def __getstate__(self) -> int:
        return os.getpid()

    def __setstate__(self, parent_pid: int) -> None:
        # A copy that is unpickled in the parent itself, or in any other process, has no effect.
        if os.getppid() == parent_pid:
            end_with_parent(parent_pid, signal.SIGKILL)
