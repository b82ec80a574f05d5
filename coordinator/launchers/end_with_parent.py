"""Runs a command that ends when its parent does.

`python -m baton.coordinator.launchers.end_with_parent PID COMMAND`.

The kernel sends SIGTERM to this process when its parent dies (PR_SET_PDEATHSIG); the setting
survives the exec of the command. It is set here instead of between fork and exec of the parent,
where a process with threads must run as little Python as possible.
"""

from __future__ import annotations

import os
import signal
import sys

from baton.runtime.process.orphans import end_with_parent


def bound_to_parent(*command: str) -> tuple[str, ...]:
    """Wraps a command so that it ends when this process ends."""
    return (
        sys.executable,
        "-m",
        "baton.coordinator.launchers.end_with_parent",
        str(os.getpid()),
        *command,
    )


def lead_group() -> None:
    """Makes a new child process lead its own process group; for the argument `preexec_fn`.

    The command can then be killed together with its children, and Ctrl-C in a terminal does not
    reach it. It does not get its own session: Linux distributes CPU time between sessions
    (autogroup). vLLM's ranks spin for a second after each step and would starve the transfer
    services of other sessions.

    It runs between fork and exec, because Ctrl-C would end an interpreter that starts in the
    terminal's group. uvloop has no argument `process_group`, and runs Python there in any case.
    """
    os.setpgid(0, 0)
    # Discards a SIGINT that came to the terminal's group after the fork; uvloop has blocked it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main(arguments: list[str]) -> None:
    parent, command = int(arguments[0]), arguments[1:]
    # The signal mask is inherited from the parent's thread and would survive the exec.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    end_with_parent(parent)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
