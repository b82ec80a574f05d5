"""Processes that end when the one that started them does, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int, how: signal.Signals = signal.SIGTERM) -> None:
    """The kernel sends a signal to this process when its parent dies; an exec keeps that promise.

    On other systems than Linux nothing is promised. "Parent" is the thread that started this
    process: one that lives as long as its process.

    Args:
        parent_pid: of the parent as it was at the start; when it is dead already, this process
            exits at once.
        how: the signal; SIGKILL where others decide what happens on SIGTERM.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, how)
    if os.getppid() != parent_pid:
        sys.exit(1)


class EndsWithParent:
    """Among what a process gives to a child that it spawns: the child is killed when it dies.

    For children that run a library's code: what they are given is unpickled before that begins.
    """

    def __getstate__(self) -> int:
        return os.getpid()

    def __setstate__(self, parent_pid: int) -> None:
        # Whoever else gets it, copied within a process too, is not bound.
        if os.getppid() == parent_pid:
            end_with_parent(parent_pid, signal.SIGKILL)
