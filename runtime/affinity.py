"""Which cores a process runs on, where a few of them make the difference."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

# vLLM's setting of the cores its CPU ranks compute on; it reads it from the environment only.
VLLM_BIND_THREADS = "VLLM_CPU_OMP_THREADS_BIND"

_claimed: set[int] = set()


def deal(cores: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Deals cores out evenly; with more shares than cores some get the same one."""
    return tuple(tuple(cores[index % len(cores) :: num_shares]) for index in range(num_shares))


def claim(cores: Collection[int]) -> list[int]:
    """Says that this process computes on these cores, for as long as it lives.

    By names that the kernel gives to one socket each, and has back when its process ends.

    Returns:
        Those that another process of this host has said so of.
    """
    taken = []
    for core in sorted(set(cores) - _claimed):
        one = socket.socket(socket.AF_UNIX)
        try:
            one.bind(f"\0baton-core-{core}")
        except OSError as error:
            # Where such names are not to be had nobody can say so.
            if error.errno == errno.EADDRINUSE:
                taken.append(core)
            one.close()
        else:
            _claimed.add(core)
            # It stays open until the process ends.
            one.detach()
    return taken


def keep_off(cpus: Collection[int]) -> None:
    """Moves every thread of this process off `cpus`, unless it may use no other core.

    Processes started later inherit it.
    """
    if others := os.sched_getaffinity(0).difference(cpus):
        run_on(others)


def run_on(cpus: Collection[int]) -> None:
    """Moves every thread of this process to `cpus`.

    Raises:
        OSError: this process may use none of them.
    """
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        # One that has just ended needs no core.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)
