"""Runs a command that ends when its parent does.

`python -m baton.coordinator.launchers.end_with_parent PID COMMAND`.

The kernel sends SIGTERM to this process when its parent dies (PR_SET_PDEATHSIG); the setting
survives the exec of the command. It is set here instead of between fork and exec of the parent,
where a process with threads must not run Python.

The command leads its own process group, so that it can be killed together with its children, and
Ctrl-C in a terminal does not reach it. It does not get its own session: Linux distributes CPU time
between sessions (autogroup). vLLM's ranks spin for a second after each step and would starve the
transfer services of other sessions.
"""

from __future__ import annotations

import os
import signal
import sys

from baton.runtime.orphans import end_with_parent


def bound_to_parent(*command: str) -> tuple[str, ...]:
    """Wraps a command so that it ends when this process ends."""
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
    # The signal mask is inherited from the parent's thread and would survive the exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
