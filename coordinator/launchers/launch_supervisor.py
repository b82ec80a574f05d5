"""Starts and ends worker processes for the core through a launcher, and reports their exits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from baton.coordinator.launchers.launcher import Launcher, WorkerExit
from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision

_log = logging.getLogger(__name__)

# Longest wait of `close` for starts under way. A start through Ray may take as long as the
# connection to Ray, which may never be made.
_START_GRACE_S = 2.0

_Step: TypeAlias = Callable[[Launcher], Awaitable[None]]


class LaunchSupervisor:
    """Executes StartWorker and EndWorker; those of one worker run one after the other.

    Args:
        post: Callback for events about the workers.

    Attributes:
        first_failure: resolves to the reason of the first worker exit or failed start.
    """

    def __init__(self, post: Callable[[ev.WorkerExited | ev.WorkerWaits], None]) -> None:
        self._post = post
        self._launcher: Launcher | None = None
        # The latest step (start or end) of each worker; each step waits for the previous one.
        self._steps: dict[str, asyncio.Task[None]] = {}
        # All starts that have not finished, also those that an end of their worker waits for.
        self._starts: set[asyncio.Task[None]] = set()
        self._closed = False
        self.first_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def use(self, launcher: Launcher) -> None:
        """Sets the launcher; its `on_exit` must be this object's `on_exit`."""
        self._launcher = launcher

    def on_exit(self, worker_exit: WorkerExit) -> None:
        """Handles a worker that ended without being told to."""
        if worker_exit.exit_code != 0:
            _log.error("%s", worker_exit)
        else:
            _log.info("%s", worker_exit)
        self._failed(worker_exit.loading_failure)
        loading = worker_exit.loading_failure.removeprefix(f"worker {worker_exit.worker_id} ")
        self._post(ev.WorkerExited(worker_exit.worker_id, worker_exit.reason, loading))

    def on_waits(self, worker_id: str, reason: str) -> None:
        """Records why a worker cannot be started yet; an empty reason ends the wait."""
        if reason:
            _log.warning("worker %s %s", worker_id, reason)
        self._post(ev.WorkerWaits(worker_id, reason))

    def start(self, worker_id: str, pool: Pool, revision: Revision) -> None:
        if not self._closed:
            start = self._enqueue(
                worker_id, "start", lambda one: self._start(one, worker_id, pool, revision)
            )
            self._starts.add(start)
            start.add_done_callback(self._starts.discard)

    def end(self, worker_id: str) -> None:
        if not self._closed:
            self._enqueue(worker_id, "end", lambda one: self._end(one, worker_id))

    async def close(self) -> None:
        """Ends all worker processes, and refuses later starts.

        Starts that take longer than _START_GRACE_S are cancelled.
        """
        self._closed = True
        launcher = self._launcher
        assert launcher is not None
        # launcher.stop() ends only processes whose start has finished.
        if self._starts:
            _, late = await asyncio.wait(self._starts, timeout=_START_GRACE_S)
            for start in late:
                start.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await launcher.stop()
        await asyncio.gather(*self._steps.values(), return_exceptions=True)

    # ---- Private methods

    def _enqueue(self, worker_id: str, kind: str, step: _Step) -> asyncio.Task[None]:
        """Runs a step of a worker after the worker's earlier steps; returns the step's task."""
        assert self._launcher is not None
        before = self._steps.get(worker_id)
        task = asyncio.create_task(
            self._run_after(before, step, self._launcher), name=f"{kind} {worker_id}"
        )
        self._steps[worker_id] = task
        task.add_done_callback(lambda done: self._forget(worker_id, done))
        return task

    def _forget(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._steps.get(worker_id) is task:
            del self._steps[worker_id]

    @staticmethod
    async def _run_after(
        before: asyncio.Task[None] | None, step: _Step, launcher: Launcher
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        await step(launcher)

    async def _start(
        self, launcher: Launcher, worker_id: str, pool: Pool, revision: Revision
    ) -> None:
        try:
            await launcher.start(worker_id, pool.value, revision)
        except Exception as error:
            # Any exception counts as a failed start; the core decides about the next attempt.
            reason = f"could not be started: {error}"
            _log.error("worker %s %s", worker_id, reason)
            self._failed(f"worker {worker_id} {reason}")
            self._post(ev.WorkerExited(worker_id, reason))

    async def _end(self, launcher: Launcher, worker_id: str) -> None:
        try:
            await launcher.end(worker_id)
        except Exception as error:
            _log.exception("worker %s could not be ended", worker_id, exc_info=error)
        self._post(ev.WorkerExited(worker_id, "was ended", gone=True))

    def _failed(self, why: str) -> None:
        if not self.first_failure.done():
            self.first_failure.set_result(why)
