"""Errors that end a worker process."""

from __future__ import annotations


class WorkerFailed(Exception):
    """The worker cannot continue; the message is one line for people.

    Attributes:
        exit_code: Exit code of the process: 1 failed, 3 no coordinator.
    """

    exit_code = 1


class NoCoordinator(WorkerFailed):
    """No coordinator answered for too long."""

    exit_code = 3
