"""Runs one worker as a child process: passes its configuration in, its output on, and ends it."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import logging
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.coordinator.launchers.end_with_parent import bound_to_parent, lead_group
from baton.runtime.process import output_streams, worker_directory
from baton.runtime.process.locked_directory import LockedDirectory
from baton.runtime.process.long_tasks import log_failure

_log = logging.getLogger(__name__)

# Command that runs `baton` in this environment; arguments are appended.
BATON = (sys.executable, "-m", "baton.cli")

_READ_BYTES = 64 * 2**10
_MAX_LINE_BYTES = 4 * 2**10
# Matches the last line of a traceback, with or without the prefix of vLLM's log lines.
_EXCEPTION = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)$")
# Matches debug and info log lines, which do not explain why a process ended.
_DEBUG_OR_INFO = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+ (?:debug|info) ")
# Time for a dead worker's engine and transfer service to free their resources and end.
_GROUP_GRACE_S = 15.0
_GROUP_POLL_S = 0.02
# Time to read the rest of a worker's output after its last process has ended.
_OUTPUT_TIMEOUT_S = 5.0
# Maximum time for the kernel to end a process after SIGKILL.
KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """A worker process that ended without being told to.

    Attributes:
        exit_code: exit code; negative for a signal's number; None if the exit was not observed.
        last_line: the worker's own error message, or else the last line of stderr. Empty if there
            was no output or if the last line was a debug or info message.
        first_error: first exception that the worker or its child processes printed, including
            stdout (vLLM logs there); empty if there was none. During loading it is the root cause.
        lost: description of the loss if there is no exit code; it follows "worker w1 ...".
    """

    worker_id: str
    exit_code: int | None
    last_line: str = ""
    first_error: str = ""
    lost: str = "was lost"

    @property
    def reason(self) -> str:
        """Description of the exit; it follows "worker w1 ..."."""
        if self.exit_code is None:
            how = self.lost
        elif self.exit_code < 0:
            how = f"was killed by {signal.Signals(-self.exit_code).name}"
        else:
            how = f"exited with code {self.exit_code}"
        return f"{how}: {self.last_line}" if self.last_line else how

    @property
    def loading_failure(self) -> str:
        """Why the worker failed to load.

        It includes first_error, because an engine of several processes only reports "see above".
        """
        known = not self.first_error or self.first_error in self.last_line
        return str(self) if known else f"{self}; first error: {self.first_error}"

    def __str__(self) -> str:
        return f"worker {self.worker_id} {self.reason}"


class _Pipe:
    """The output of a process as a stream.

    asyncio's own pipes are not used: with them, waiting for a process also waits for all processes
    that inherited its output.
    """

    def __init__(
        self, write_end: int, reader: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        self.write_end, self.reader, self._transport = write_end, reader, transport

    @classmethod
    async def open(cls) -> _Pipe:
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", 0)
            )
        except BaseException:
            os.close(write_end)
            raise
        return cls(write_end, reader, transport)

    def close(self) -> None:
        self._transport.close()


class WorkerProcess:
    """One worker process, which leads its own process group.

    The worker reads its configuration from stdin; its output goes to this process's stderr. The
    worker gets SIGTERM when this process dies for any reason. The worker's directory is removed
    after its last process has ended.
    """

    def __init__(
        self,
        worker_id: str,
        process: asyncio.subprocess.Process,
        output: _Pipe,
        errors: _Pipe,
        directory: LockedDirectory,
        config: bytes,
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        self._worker_id, self._process, self._on_exit = worker_id, process, on_exit
        self._output, self._errors, self._directory = output, errors, directory
        self._stopping = self._reported = self._given_up = False
        self._last_line, self._own_error, self._first_error = "", "", ""
        self._watch = asyncio.create_task(self._run(config), name=f"worker {worker_id}")
        self._watch.add_done_callback(log_failure)

    @classmethod
    async def start(
        cls,
        worker_id: str,
        role: str,
        coordinator: str,
        config: str,
        on_exit: Callable[[WorkerExit], None],
        *,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> WorkerProcess:
        """Starts a worker process; returns before the worker serves.

        Args:
            worker_id: ID of the worker, unique in the cluster.
            role: "prefill" or "decode".
            coordinator: host:port that the worker attaches to.
            config: effective configuration as YAML.
            on_exit: called once, unless the worker was told to stop.
            command: command that runs a worker; the arguments of `baton` are appended.
            environment: variables added to this process's environment.

        Raises:
            OSError: The process cannot be started.
        """
        directory = worker_directory.make()
        worker = ("worker", "--role", role, "--worker-id", worker_id)
        settings = ("--coordinator", coordinator, "--config", "-")
        with contextlib.ExitStack() as write_ends, contextlib.ExitStack() as unstarted:
            unstarted.callback(directory.remove)
            output = await _Pipe.open()
            write_ends.callback(os.close, output.write_end)
            unstarted.callback(output.close)
            errors = await _Pipe.open()
            write_ends.callback(os.close, errors.write_end)
            unstarted.callback(errors.close)
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(*command, *worker, *settings, "--directory", str(directory.path)),
                stdin=asyncio.subprocess.PIPE,
                stdout=output.write_end,
                stderr=errors.write_end,
                env={**os.environ, **environment},
                preexec_fn=lead_group,
            )
            unstarted.pop_all()
        return cls(worker_id, process, output, errors, directory, config.encode(), on_exit)

    async def stop(self, stop_timeout_s: float) -> None:
        """Sends SIGTERM, then SIGKILL to the remaining processes of the group.

        If the worker has already ended by itself, its remaining processes first get
        _GROUP_GRACE_S seconds to free their resources.
        """
        is_second_stop, self._stopping = self._stopping, True
        try:
            if self._process.returncode is not None:
                await asyncio.wait([self._watch], timeout=_GROUP_GRACE_S)
            else:
                await self._terminate(stop_timeout_s, send_signal=not is_second_stop)
        finally:
            # No process of the group may be left, even if this call was cancelled.
            self._kill_group()
            try:
                await asyncio.wait([self._watch], timeout=KILL_TIMEOUT_S)
            finally:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)

    async def _terminate(self, stop_timeout_s: float, *, send_signal: bool) -> None:
        # The worker must get only one SIGTERM: a second one makes it stop without draining.
        if send_signal:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        try:
            async with asyncio.timeout(stop_timeout_s):
                await self._process.wait()
        except TimeoutError:
            if self._given_up:
                return
            self._given_up = True
            _log.warning(
                "worker %s did not stop within %g s: killed", self._worker_id, stop_timeout_s
            )

    async def _run(self, config: bytes) -> None:
        """Runs until the process has ended and its output is read."""
        try:
            async with asyncio.TaskGroup() as group:
                pipes = [
                    group.create_task(self._feed(config)),
                    group.create_task(self._relay(self._output.reader, remember=False)),
                    group.create_task(self._relay(self._errors.reader, remember=True)),
                ]
                exit_code = await self._process.wait()
                if exit_code < 0:
                    # A killed worker prints no reason, so reading its output first would only
                    # delay the report until its child processes have ended.
                    self._report(exit_code)
                # The child processes hold the output pipes open until they end.
                await self._end_group()
                # A child process that has left the group may hold the pipes open for ever.
                await asyncio.wait(pipes, timeout=_OUTPUT_TIMEOUT_S)
                for pipe in pipes:
                    pipe.cancel()
        finally:
            self._output.close()
            self._errors.close()
            self._directory.remove()
        self._report(exit_code)

    def _report(self, exit_code: int) -> None:
        """Reports the exit once, unless the worker was told to stop."""
        if self._stopping or self._reported:
            return
        self._reported = True
        last_line = self._own_error or self._last_line
        self._on_exit(WorkerExit(self._worker_id, exit_code, last_line, self._first_error))

    async def _feed(self, config: bytes) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # uvloop raises RuntimeError for a pipe that was closed because the process is gone.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
            stdin.write(config)
            await stdin.drain()
            stdin.close()
            await stdin.wait_closed()

    async def _relay(self, pipe: asyncio.StreamReader, *, remember: bool) -> None:
        """Passes the worker's output on, and keeps lines that may explain its exit."""
        tail: deque[bytes] = deque([b""], maxlen=2)
        # A character of several bytes may be split between two reads.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        try:
            while chunk := await pipe.read(_READ_BYTES):
                output_streams.stderr.write(decoder.decode(chunk))
                for number, part in enumerate(chunk.split(b"\n")):
                    if number:
                        self._remember(tail[-1], remember)
                        tail.append(b"")
                    tail[-1] = (tail[-1] + part)[:_MAX_LINE_BYTES]
        finally:
            self._remember(tail[-1], remember)

    def _remember(self, line: bytes, remember: bool) -> None:
        text = line.decode(errors="replace").strip()
        if not self._first_error and (found := _EXCEPTION.search(text)) is not None:
            self._first_error = found[1]
        if not remember or not text:
            return
        self._last_line = "" if _DEBUG_OR_INFO.match(text) else text
        own = f"baton worker {self._worker_id}: "
        if text.startswith(own):
            self._own_error = text.removeprefix(own)

    async def _end_group(self) -> None:
        """Waits for a dead worker's child processes, then kills the remaining ones.

        They get no SIGTERM: it would be the second request to stop and interrupt their cleanup.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError, TimeoutError):
            async with asyncio.timeout(_GROUP_GRACE_S):
                while True:
                    os.killpg(self._process.pid, 0)
                    await asyncio.sleep(_GROUP_POLL_S)
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
