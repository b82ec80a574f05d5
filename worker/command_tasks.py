"""Commands of the coordinator that run beside the worker's requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from google.rpc import code_pb2

from baton.engine.base import EngineDead
from baton.runtime.errors import BatonError, Internal, RemoteError, to_message
from baton.v1 import common_pb2

_log = logging.getLogger(__name__)

# Longest wait for cancelled commands before the engine is stopped, in seconds.
CLOSE_S = 1.0


class CommandTasks:
    """Owns the tasks of commands of one kind; all methods are called from one event loop.

    Args:
        name: Kind of the commands, for task names.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task that executes a command."""
        task = asyncio.create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends the commands before the engine is stopped."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)

    def failed(self, error: Exception) -> common_pb2.RequestError:
        """Returns the message for a command's error, and logs an unexpected error."""
        return error_message(error, f"the command '{self._name}'")


def error_message(error: Exception, subject: str) -> common_pb2.RequestError:
    """Returns the message for a command's error, and logs an unexpected error.

    Args:
        error: The error that ended the command.
        subject: Name of the failed work, for the message and the log.
    """
    if isinstance(error, EngineDead):
        return to_message(RemoteError(code_pb2.UNAVAILABLE, str(error), []))
    if isinstance(error, BatonError):
        return to_message(error)
    _log.error("%s failed", subject, exc_info=error)
    return to_message(Internal(f"{subject} failed: {type(error).__name__}: {error}"))
