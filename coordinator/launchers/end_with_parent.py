"""Runs a command that ends when its parent does.

`python -m baton.coordinator.launchers.end_with_parent PID COMMAND`.

The kernel sends SIGTERM to this process when the one that started it dies, and keeps that promise
across the exec that replaces this program by the command. Done here and not between fork and exec
of the parent, where a process with threads may not run Python.

The command leads a process group of its own, so that it can be killed with all it started and a
terminal's Ctrl-C does not reach it. A group, not a session: Linux shares the CPU between sessions
(autogroup), and vLLM's ranks, which spin for a second after each step, then starve the transfer
services of other sessions for as long.
"""

from __future__ import annotations

import os
import signal
import sys

from baton.runtime.orphans import end_with_parent


def bound_to_parent(*command: str) -> tuple[str, ...]:
    """A command as this process starts it, to end with it."""
    return (
        sys.executable,
        "-m",
        "baton.coordinator.launchers.end_with_parent",
        str(os.getpid()),
        *command,
    )


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    os.setpgid(0, 0)
    # Signals that were blocked in the thread that started this one stay blocked across the exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
