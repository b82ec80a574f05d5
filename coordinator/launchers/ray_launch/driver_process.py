"""The driver (driver.py) as the coordinator has it: a child process that is told and heard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from baton.coordinator.launchers.end_with_parent import bound_to_parent
from baton.coordinator.launchers.launcher import LaunchError, OnWaits
from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.worker_process import KILL_TIMEOUT_S, WorkerExit

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

# Of a driver that answers: Ray's own calls have shorter deadlines in there.
_START_TIMEOUT_S = 60.0
# Beyond the workers' time: their actors, and a Ray of one's own.
_END_MARGIN_S = 60.0


class DriverProcess:
    """The driver process, from its start to its end.

    Attributes:
        ended: it takes no more workers, and all it had are reported.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        opening: wire.Open,
        on_exit: Callable[[WorkerExit], None],
        on_waits: OnWaits,
    ) -> None:
        self._process, self._opening = process, opening
        self._on_exit, self._on_waits = on_exit, on_waits
        self._what = f"Ray at {opening.address}" if opening.address else "Ray on this host"
        self._opened: asyncio.Future[wire.Ready | wire.Refused]
        self._opened = asyncio.get_running_loop().create_future()
        self._starting: dict[str, asyncio.Future[str]] = {}
        self._ending: dict[str, asyncio.Future[None]] = {}
        # Started and not ended: whether its exit has been reported.
        self._workers: dict[str, bool] = {}
        self._silent_s = 0.0
        self.ended = self._closing = False
        self._reader = asyncio.create_task(self._read(), name="ray driver")

    @classmethod
    async def open(
        cls,
        opening: wire.Open,
        on_exit: Callable[[WorkerExit], None],
        on_waits: OnWaits,
        timeout_s: float,
    ) -> DriverProcess:
        """Starts the process, and returns when it has connected to Ray.

        Raises:
            LaunchError: it cannot, or not within timeout_s, which is ray.connect_timeout_s.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(
                    sys.executable, "-m", "baton.coordinator.launchers.ray_launch.driver"
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(own=not opening.address),
                limit=wire.MAX_LINE_BYTES,
            )
        except BaseException:
            shutil.rmtree(opening.directory, ignore_errors=True)
            raise
        driver = cls(process, opening, on_exit, on_waits)
        try:
            driver._say(opening)
            async with asyncio.timeout(timeout_s):
                opened = await driver._opened
            if isinstance(opened, wire.Refused):
                raise LaunchError(opened.why)
        except TimeoutError:
            await driver.close(at_once=True)
            raise LaunchError(
                f"{driver._what}: not connected within ray.connect_timeout_s {timeout_s:g}"
            ) from None
        except BaseException:
            await driver.close(at_once=True)
            raise
        _log.info("connected to %s, %d nodes", driver._what, opened.num_nodes)
        return driver

    async def start_worker(self, start: wire.Start) -> None:
        """Raises LaunchError."""
        if self.ended:
            raise LaunchError(f"{self._what} has stopped")
        if self._silent_s:
            raise LaunchError(f"{self._what} has not answered for {self._silent_s:.0f} s")
        worker_id = start.worker_id
        why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._starting[worker_id] = why
        self._workers[worker_id] = False
        self._say(start)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                refused = await why
        except TimeoutError:
            refused = f"{self._what} has not started it within {_START_TIMEOUT_S:g} s"
        except BaseException:
            self._forget(worker_id)
            raise
        finally:
            self._starting.pop(worker_id, None)
        if refused:
            self._forget(worker_id)
            raise LaunchError(refused)

    def _forget(self, worker_id: str) -> None:
        del self._workers[worker_id]
        self._say(wire.End(worker_id))

    async def end_worker(self, worker_id: str) -> None:
        if self.ended or worker_id not in self._workers:
            self._workers.pop(worker_id, None)
            return
        self._workers[worker_id] = True
        ending = self._ending.get(worker_id)
        if ending is None:
            ending = self._ending[worker_id] = asyncio.get_running_loop().create_future()
            self._say(wire.End(worker_id))
        try:
            async with asyncio.timeout(self._opening.stop_timeout_s + _END_MARGIN_S):
                await asyncio.shield(ending)
        except TimeoutError:
            _log.error("%s does not end worker %s", self._what, worker_id)
        finally:
            self._ending.pop(worker_id, None)
            self._workers.pop(worker_id, None)

    async def close(self, *, at_once: bool = False) -> None:
        """Ends its workers, then it; returns when nothing of them and of an own Ray is left."""
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        stop_timeout_s = 0.0 if at_once else self._opening.stop_timeout_s + _END_MARGIN_S
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stop_timeout_s):
                    await self._process.wait()
        finally:
            # Also when nobody waits for it any more.
            await self._kill()

    async def _kill(self) -> None:
        """What has not ended; then nothing of it is left."""
        # An own Ray is of its group, and dies with it too.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    # The end of its output can be known before its own.
                    await self._process.wait()
                    # What ended the reading is not what ends the closing.
                    await asyncio.wait([self._reader])
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await asyncio.to_thread(shutil.rmtree, self._opening.directory, ignore_errors=True)

    def _say(self, message: wire.Message) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # uvloop's, of a pipe that has been closed because the process is gone: `_read` tells.
        with contextlib.suppress(RuntimeError):
            stdin.write(wire.encode(message))

    async def _read(self) -> None:
        """Takes what the driver says, until it has ended."""
        output = self._process.stdout
        assert output is not None
        try:
            while line := await output.readline():
                self._take(wire.decode(line))
        finally:
            self._has_ended()

    def _take(self, message: wire.Message) -> None:
        match message:
            case wire.Ready() | wire.Refused():
                _settle(self._opened, message)
            case wire.Started(worker_id, why):
                _settle(self._starting.get(worker_id), why)
            case wire.Placed(worker_id, node, host):
                _log.info("worker %s is on node %s of Ray, host %s", worker_id, node, host)
                self._on_waits(worker_id, "")
            case wire.Waits(worker_id, why):
                self._on_waits(worker_id, f"waits for room in Ray: {why}")
            case wire.Exited(worker_id, exit_code, last_line, first_error, lost):
                self._exited(WorkerExit(worker_id, exit_code, last_line, first_error, lost))
            case wire.Ended(worker_id):
                _settle(self._ending.get(worker_id), None)
            case wire.Silent(silent_s):
                if silent_s and not self._silent_s:
                    _log.error("%s does not answer: no workers can be started", self._what)
                elif not silent_s and self._silent_s:
                    _log.info("%s answers again", self._what)
                self._silent_s = silent_s

    def _exited(self, worker_exit: WorkerExit) -> None:
        if self._workers.get(worker_exit.worker_id) is False:
            self._workers[worker_exit.worker_id] = True
            self._on_exit(worker_exit)

    def _has_ended(self) -> None:
        self.ended = True
        stopped = f"{self._what} has stopped"
        if not self._closing:
            _log.error("%s", stopped)
            for worker_id in self._workers:
                lost = f"was lost: {stopped}"
                self._exited(WorkerExit(worker_id, None, lost=lost))
        _settle(self._opened, wire.Refused(stopped))
        for starting in self._starting.values():
            _settle(starting, stopped)
        for ending in self._ending.values():
            _settle(ending, None)


def _settle(future: asyncio.Future[_T] | None, value: _T) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _environment(*, own: bool) -> dict[str, str]:
    """Of the driver."""
    # Workers' output as they write it: it says whose it is.
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1"}
    if own:
        # For this Ray's processes alone; Ray would keep one in the home directory.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return environment
