"""Pins threads to CPU cores, and claims cores so that other processes on the host see the claim."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Collection, Sequence
from pathlib import Path

# vLLM reads the cores for its CPU ranks from this environment variable only.
VLLM_BIND_THREADS = "VLLM_CPU_OMP_THREADS_BIND"

_claimed: set[int] = set()


def split_cores(cores: Sequence[int], num_shares: int) -> tuple[tuple[int, ...], ...]:
    """Splits cores evenly; with more shares than cores, some shares get the same core."""
    return tuple(tuple(cores[index % len(cores) :: num_shares]) for index in range(num_shares))


def claim_cores(cores: Collection[int]) -> list[int]:
    """Marks cores as used by this process until it ends.

    Each mark is an abstract Unix socket name, which the kernel frees when the process ends.

    Returns:
        Cores that another process of this host has already claimed.
    """
    taken = []
    for core in sorted(set(cores) - _claimed):
        one = socket.socket(socket.AF_UNIX)
        try:
            one.bind(f"\0baton-core-{core}")
        except OSError as error:
            # Without abstract socket names (other errors) claims are not possible; ignore them.
            if error.errno == errno.EADDRINUSE:
                taken.append(core)
            one.close()
        else:
            _claimed.add(core)
            # The socket stays open, and the claim valid, until the process ends.
            one.detach()
    return taken


def avoid_cores(cpus: Collection[int]) -> None:
    """Moves every thread of this process off `cpus`, unless no other core is allowed.

    Child processes started later inherit the affinity.
    """
    if others := os.sched_getaffinity(0).difference(cpus):
        pin_to(others)


def pin_to(cpus: Collection[int]) -> None:
    """Moves every thread of this process to `cpus`.

    Raises:
        OSError: The kernel allows none of these cores to this process.
    """
    os.sched_setaffinity(0, cpus)
    for thread in Path("/proc/self/task").iterdir():
        # The thread may have ended since the directory was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cpus)
