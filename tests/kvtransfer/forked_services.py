"""Starts transfer services, forked from a process that has imported their modules.

The imports take nearly all of the CPU time of a service that tests use for a moment.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os

import pytest

from baton.kvtransfer import transfer_client
from tests.cluster.fork_server import Command, ForkServer


class ForkedService:
    """A running service, with what TransferClient uses of asyncio.subprocess.Process."""

    def __init__(self, command: Command, stdout: asyncio.StreamReader, stderr) -> None:
        self.pid, self.stdout, self.stderr = command.pid, stdout, stderr
        self._command = command

    @property
    def returncode(self) -> int | None:
        return self._command.returncode

    async def wait(self) -> int:
        return await asyncio.shield(asyncio.wrap_future(self._command.ended))

    def terminate(self) -> None:
        self._command.terminate()

    def kill(self) -> None:
        self._command.kill()


@functools.cache
def _server() -> ForkServer:
    return ForkServer("baton.kvtransfer.service.__main__", "baton.kvtransfer.service.service")


@pytest.fixture
def forked_services(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfer services of the test are forked; the fork server is their parent."""
    monkeypatch.setattr(transfer_client, "_spawn", _spawn)


async def _spawn(arguments: dict[str, object]) -> ForkedService:
    server = _server()
    (stdout, stdout_end), (stderr, stderr_end) = await _pipe(), await _pipe()
    given = [json.dumps(arguments | {"parent_pid": server.pid})]
    try:
        command = await asyncio.to_thread(server.fork, given, stdout_end, stderr_end)
    finally:
        os.close(stdout_end)
        os.close(stderr_end)
    return ForkedService(command, stdout, stderr)


async def _pipe() -> tuple[asyncio.StreamReader, int]:
    """Returns a reader of a new pipe, and the descriptor of the pipe's other end."""
    reads, writes = os.pipe()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reads, "rb")
    )
    return reader, writes
