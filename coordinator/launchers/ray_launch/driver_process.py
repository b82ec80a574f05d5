"""The coordinator's side of the Ray driver (driver.py): the child process and its messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

from baton.coordinator.launchers.end_with_parent import bound_to_parent, lead_group
from baton.coordinator.launchers.launcher import LaunchError, OnWaits
from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.worker_process import KILL_TIMEOUT_S, WorkerExit
from baton.runtime.process.locked_directory import LockedDirectory
from baton.runtime.process.long_tasks import log_failure

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

# Time for a driver to start a worker's actor; the driver's calls into Ray have shorter timeouts.
_START_TIMEOUT_S = 60.0
# Time to end actors and a local Ray, in addition to the workers' stop timeout.
_END_MARGIN_S = 60.0


class DriverProcess:
    """The driver process, from its start to its end.

    Attributes:
        ended: whether the driver has ended; all its workers are then reported as lost.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        opening: wire.Open,
        on_exit: Callable[[WorkerExit], None],
        on_waits: OnWaits,
        directory: LockedDirectory | None = None,
    ) -> None:
        self._process, self._opening, self._directory = process, opening, directory
        self._on_exit, self._on_waits = on_exit, on_waits
        self._ray_name = f"Ray at {opening.address}" if opening.address else "Ray on this host"
        self._opened: asyncio.Future[wire.Ready | wire.Refused]
        self._opened = asyncio.get_running_loop().create_future()
        self._starting: dict[str, asyncio.Future[str]] = {}
        self._ending: dict[str, asyncio.Future[None]] = {}
        # Workers that were started and not ended; the value says whether the exit was reported.
        self._workers: dict[str, bool] = {}
        self._silent_s = 0.0
        self.ended = self._closing = False
        self._reader = asyncio.create_task(self._read(), name="ray driver")
        self._reader.add_done_callback(log_failure)

    @classmethod
    async def open(
        cls,
        opening: wire.Open,
        on_exit: Callable[[WorkerExit], None],
        on_waits: OnWaits,
        directory: LockedDirectory | None = None,
    ) -> DriverProcess:
        """Starts the driver; returns when it has connected to Ray.

        Args:
            opening: The first message to the driver.
            on_exit: Called once for each worker that ends without being told to.
            on_waits: See OnWaits.
            directory: Directory of a local Ray, which is removed when the driver has ended; None
                for a cluster.

        Raises:
            LaunchError: The driver cannot connect within ray.connect_timeout_s.
        """
        timeout_s = opening.connect_timeout_s
        try:
            process = await asyncio.create_subprocess_exec(
                *bound_to_parent(
                    sys.executable, "-m", "baton.coordinator.launchers.ray_launch.driver"
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(own=not opening.address),
                limit=wire.MAX_LINE_BYTES,
                preexec_fn=lead_group,
            )
        except BaseException:
            if directory is not None:
                directory.remove()
            raise
        driver = cls(process, opening, on_exit, on_waits, directory)
        try:
            driver._say(opening)
            async with asyncio.timeout(timeout_s):
                opened = await driver._opened
            if isinstance(opened, wire.Refused):
                raise LaunchError(opened.why)
        except TimeoutError:
            await driver.close(at_once=True)
            raise LaunchError(
                f"{driver._ray_name}: not connected within ray.connect_timeout_s ({timeout_s:g} s)"
            ) from None
        except BaseException:
            await driver.close(at_once=True)
            raise
        _log.info("connected to %s, %d nodes", driver._ray_name, opened.num_nodes)
        return driver

    async def start_worker(self, start: wire.Start) -> None:
        """Starts a worker; raises LaunchError."""
        if self.ended:
            raise LaunchError(f"{self._ray_name} has stopped")
        if self._silent_s:
            raise LaunchError(f"{self._ray_name} has not answered for {self._silent_s:.0f} s")
        worker_id = start.worker_id
        why: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._starting[worker_id] = why
        self._workers[worker_id] = False
        self._say(start)
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                refused = await why
        except TimeoutError:
            refused = f"{self._ray_name} has not started the worker within {_START_TIMEOUT_S:g} s"
        except BaseException:
            self._give_up_start(worker_id)
            raise
        finally:
            self._starting.pop(worker_id, None)
        if refused:
            self._give_up_start(worker_id)
            raise LaunchError(refused)

    def _give_up_start(self, worker_id: str) -> None:
        """Ends a worker that the driver may have started or may still start."""
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
            _log.error("%s did not end worker %s in time", self._ray_name, worker_id)
        finally:
            self._ending.pop(worker_id, None)
            self._workers.pop(worker_id, None)

    async def close(self, *, at_once: bool = False) -> None:
        """Ends the workers, the driver and its local Ray; returns when all processes have ended."""
        self._closing = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        stop_timeout_s = 0.0 if at_once else self._opening.stop_timeout_s + _END_MARGIN_S
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stop_timeout_s):
                    await self._process.wait()
        finally:
            # No process of the driver may be left, even if this call was cancelled.
            await self._kill()

    async def _kill(self) -> None:
        """Kills the driver's process group, which includes a local Ray."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    # The output can end before the process does.
                    await self._process.wait()
                    # asyncio.wait, because an exception in the reader must not stop the cleanup.
                    await asyncio.wait([self._reader])
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            if self._directory is not None:
                await asyncio.to_thread(self._directory.remove)

    def _say(self, message: wire.Message) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        # uvloop raises RuntimeError if the process is gone; `_read` reports that.
        with contextlib.suppress(RuntimeError):
            stdin.write(wire.encode(message))

    async def _read(self) -> None:
        """Handles the driver's messages until the driver ends."""
        output = self._process.stdout
        assert output is not None
        try:
            while line := await output.readline():
                self._take(wire.decode(line))
        finally:
            self._on_driver_end()

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
                self._on_waits(worker_id, f"waits for room in Ray: {why}" if why else "")
            case wire.Exited(worker_id, exit_code, last_line, first_error, lost):
                self._exited(WorkerExit(worker_id, exit_code, last_line, first_error, lost))
            case wire.Ended(worker_id):
                _settle(self._ending.get(worker_id), None)
            case wire.Silent(silent_s):
                if silent_s and not self._silent_s:
                    _log.error("%s does not answer: no workers can be started", self._ray_name)
                elif not silent_s and self._silent_s:
                    _log.info("%s answers again", self._ray_name)
                self._silent_s = silent_s

    def _exited(self, worker_exit: WorkerExit) -> None:
        if self._workers.get(worker_exit.worker_id) is False:
            self._workers[worker_exit.worker_id] = True
            self._on_exit(worker_exit)

    def _on_driver_end(self) -> None:
        self.ended = True
        stopped = f"{self._ray_name} has stopped"
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
    """Environment of the driver."""
    # Ray must not prefix workers' output: each line already names its worker.
    environment = {**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_DISABLE_WORKER_LOG_PREFIX": "1"}
    if own:
        # A token for this local Ray only. Otherwise Ray would keep one in the home directory.
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Ray's default niceness of 15 would let other processes of the host slow workers down.
        environment.setdefault("RAY_worker_niceness", "0")
    return environment
