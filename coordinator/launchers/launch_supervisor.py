"""The processes that the core wants: started, ended and heard of through a launcher."""

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

_Step: TypeAlias = Callable[[Launcher], Awaitable[None]]


class LaunchSupervisor:
    """Carries out StartWorker and EndWorker, for each worker in the order they came.

    Args:
        post: takes what became of the workers.

    Attributes:
        first_failure: resolves to why a worker ended, or could not be started, for the first time.
    """

    def __init__(self, post: Callable[[ev.WorkerExited | ev.WorkerWaits], None]) -> None:
        self._post = post
        self._launcher: Launcher | None = None
        # The latest step of each worker; it waits for the one before. One or two per process.
        self._steps: dict[str, asyncio.Task[None]] = {}
        self._closed = False
        self.first_failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def use(self, launcher: Launcher) -> None:
        """Begins; the launcher's `on_exit` is this one's."""
        self._launcher = launcher

    def on_exit(self, worker_exit: WorkerExit) -> None:
        """A worker has ended by itself."""
        if worker_exit.exit_code != 0:
            _log.error("%s", worker_exit)
        else:
            _log.info("%s", worker_exit)
        self._failed(worker_exit.loading_failure)
        loading = worker_exit.loading_failure.removeprefix(f"worker {worker_exit.worker_id} ")
        self._post(ev.WorkerExited(worker_exit.worker_id, worker_exit.reason, loading))

    def on_waits(self, worker_id: str, reason: str) -> None:
        """A worker cannot be started yet, and why; with an empty reason it waits no longer."""
        if reason:
            _log.warning("worker %s %s", worker_id, reason)
        self._post(ev.WorkerWaits(worker_id, reason))

    def start(self, worker_id: str, pool: Pool, revision: Revision) -> None:
        if not self._closed:
            self._then(worker_id, "start", lambda one: self._start(one, worker_id, pool, revision))

    def end(self, worker_id: str) -> None:
        if not self._closed:
            self._then(worker_id, "end", lambda one: self._end(one, worker_id))

    async def close(self) -> None:
        """Ends all of them; nothing is left when it returns, and nothing is started any more."""
        self._closed = True
        launcher = self._launcher
        assert launcher is not None
        # What is being started becomes the launcher's to stop.
        starting = [one for one in self._steps.values() if one.get_name().startswith("start ")]
        await asyncio.gather(*starting, return_exceptions=True)
        await launcher.stop()
        await asyncio.gather(*self._steps.values(), return_exceptions=True)

    # ---- Inside.

    def _then(self, worker_id: str, kind: str, step: _Step) -> None:
        assert self._launcher is not None
        before = self._steps.get(worker_id)
        task = asyncio.create_task(
            self._after(before, step, self._launcher), name=f"{kind} {worker_id}"
        )
        self._steps[worker_id] = task
        task.add_done_callback(lambda done: self._over(worker_id, done))

    def _over(self, worker_id: str, task: asyncio.Task[None]) -> None:
        if self._steps.get(worker_id) is task:
            del self._steps[worker_id]

    @staticmethod
    async def _after(before: asyncio.Task[None] | None, step: _Step, launcher: Launcher) -> None:
        if before is not None:
            await asyncio.wait([before])
        await step(launcher)

    async def _start(
        self, launcher: Launcher, worker_id: str, pool: Pool, revision: Revision
    ) -> None:
        try:
            await launcher.start(worker_id, pool.value, revision)
        except Exception as error:
            # Whatever it is made of: the next try may fare better.
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
