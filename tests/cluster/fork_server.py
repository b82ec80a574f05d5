"""Starts programs of tests, forked from a process that has imported their modules.

The imports take most of the CPU time of a command that runs for a few seconds. The commands' own
children, and those of `baton up`, are started as always.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import functools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_PROGRAM = Path(__file__).with_name("fork_server_program.py")
# Longest wait in seconds for the server, which first imports; it only bounds a server that hangs.
_START_S = 200.0
# Everything that a coordinator and a worker with the simulated engine import.
_BATON = (
    "baton.cli.main",
    "baton.cli.coordinator",
    "baton.cli.worker",
)


class Command:
    """A running program, with the methods of subprocess.Popen that tests use.

    Attributes:
        stdout: Standard output of a `baton` command, if it was asked for.
        returncode: Exit code, or the negative number of the signal that ended it; None before.
        ended: Its result is the exit code, once there is one.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdout: TextIO | None = None
        self.returncode: int | None = None
        self.ended = concurrent.futures.Future[int]()

    def end(self, code: int) -> None:
        self.returncode = code
        self.ended.set_result(code)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        try:
            return self.ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0) from None

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                # It ended a moment ago.
                self.wait(_START_S)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process of fork_server_program.py, which ends with this one.

    Args:
        main: Name of the module whose `main` is the program.
        modules: Names of other modules that the program imports.

    Attributes:
        pid: Process ID of the server, which is the parent of its programs.
    """

    def __init__(self, main: str, *modules: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(_PROGRAM), main, *modules],
                stdin=theirs,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._started: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._running: dict[int, Command] = {}
        self._asking = threading.Lock()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        atexit.register(self._close)

    def fork(self, arguments: Sequence[str], stdout: int, stderr: int) -> Command:
        """Starts a program; its output goes to these file descriptors."""
        asked = json.dumps([list(arguments), dict(os.environ), os.getcwd()]).encode()
        with self._asking:
            socket.send_fds(self._socket, [asked], [stdout, stderr])
            return self._started.get(timeout=_START_S)

    def start(self, arguments: Sequence[str], *, log: TextIO, with_stdout: bool) -> Command:
        """Starts a `baton` command; its standard error goes to `log`.

        Args:
            arguments: Arguments after `baton`.
            log: An open file.
            with_stdout: Whether the test reads the standard output; otherwise it is discarded.
        """
        if with_stdout:
            reads, writes = os.pipe()
        else:
            writes = os.open(os.devnull, os.O_WRONLY)
        try:
            command = self.fork(arguments, writes, log.fileno())
        finally:
            os.close(writes)
        if with_stdout:
            command.stdout = os.fdopen(reads)
        return command

    def _read(self) -> None:
        """Reads which processes have started, and which have ended."""
        while data := self._socket.recv(2**10):
            pid, code = json.loads(data)
            if code is None:
                command = self._running[pid] = Command(pid)
                self._started.put(command)
            else:
                self._running.pop(pid).end(code)

    def _close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait()
        self._reading.join()
        self._socket.close()


@functools.cache
def fork_server() -> ForkServer:
    """Returns this process's server for `baton` commands; the first call starts it."""
    return ForkServer(*_BATON)
