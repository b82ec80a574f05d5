"""Child processes of a process that serves gRPC."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence


class ChildProcess:
    """A child process.

    Not asyncio's own: uvloop forks, and what Python and others run in the fork before it becomes
    another program trips over the threads of gRPC (seen: SIGSEGV). subprocess uses vfork, which
    runs nothing.

    Args:
        command: program and arguments.
        given: on its standard input.
        output, errors: file descriptors.
        environment: all of it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        given: bytes,
        output: int,
        errors: int,
        environment: Mapping[str, str],
    ) -> None:
        with os.fdopen(os.memfd_create("stdin"), "w+b") as stdin:
            stdin.write(given)
            stdin.seek(0)
            self._popen = subprocess.Popen(
                command, stdin=stdin, stdout=output, stderr=errors, env=environment
            )
        self.pid = self._popen.pid
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_end)

    @property
    def returncode(self) -> int | None:
        """Negative for a signal's number; None while it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._popen.terminate()

    def _on_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._ended.set_result(self._popen.wait())
