"""Starting workers by command line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from baton.coordinator.launchers.cpu_cores import CorePlaces
from baton.coordinator.launchers.gpu_places import GpuPlaces, gpus_here
from baton.coordinator.launchers.worker_process import BATON, WorkerExit, WorkerProcess
from baton.coordinator.state.revision import Revision
from baton.runtime.config import BatonConfig, dump
from baton.runtime.errors import BatonError

__all__ = [
    "BATON",
    "LaunchError",
    "Launcher",
    "LocalLauncher",
    "OnWaits",
    "STOP_MARGIN_S",
    "WorkerExit",
]

# Beyond the worker's own time to drain: closing the engine, leaving the coordinator.
STOP_MARGIN_S = 10.0


class LaunchError(OSError, BatonError):
    """A worker cannot be started now; the message says why, in one line."""


OnWaits: TypeAlias = Callable[[str, str], None]
"""Told of a worker that cannot be started yet and why, continuing "worker w1 ..."; then of the same
with no reason, when it is."""


class Launcher(Protocol):
    """Starts and stops workers; the coordinator hears the rest over their attach streams."""

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        """Starts a worker in a role, "prefill" or "decode"; returns before it serves.

        Args:
            worker_id: unique in the cluster.
            role: as above.
            revision: what it is to run; None: what is configured.

        Raises:
            OSError: it cannot be started.
            ConfigError: the revision makes no sense.
        """
        ...

    async def end(self, worker_id: str) -> None:
        """Asks a worker to drain, and returns when nothing of it is left; idempotent.

        One that has ended already is only forgotten: to be called of every worker that was started.
        """
        ...

    async def stop(self) -> None:
        """Stops every worker and returns when nothing of them is left; idempotent."""
        ...


class LocalLauncher:
    """Workers as child processes on this host; see WorkerProcess.

    Args:
        config: the effective configuration, handed on whole.
        coordinator: host:port that they attach to.
        on_exit: told once of each worker that ends without being asked to.
        command: what runs a worker; the arguments of `baton` follow.
    """

    def __init__(
        self,
        config: BatonConfig,
        coordinator: str,
        on_exit: Callable[[WorkerExit], None],
        command: Sequence[str] = BATON,
    ) -> None:
        self._coordinator, self._on_exit, self._command = coordinator, on_exit, command
        self._places = CorePlaces(config)
        self._gpus = GpuPlaces(gpus_here() if config.engine == "vllm" else [])
        self._children: dict[str, WorkerProcess] = {}
        # Its own time to drain, and what comes after it.
        self._stop_timeout_s = config.worker.drain_timeout_s + STOP_MARGIN_S

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        config = self._places.config if revision is None else revision.over(self._places.config)
        pool = config.prefill if role == "prefill" else config.decode
        num_ranks = config.num_ranks(pool)
        environment = self._places.take(worker_id, num_ranks)
        environment |= self._gpus.take(worker_id, num_ranks)
        try:
            self._children[worker_id] = await WorkerProcess.start(
                worker_id,
                role,
                self._coordinator,
                dump(config),
                self._on_exit,
                command=self._command,
                environment=environment,
            )
        except BaseException:
            self._give_back(worker_id)
            raise

    async def end(self, worker_id: str) -> None:
        child = self._children.get(worker_id)
        if child is not None:
            await child.stop(self._stop_timeout_s)
            self._children.pop(worker_id, None)
            self._give_back(worker_id)

    async def stop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker_id in list(self._children):
                group.create_task(self.end(worker_id))

    def _give_back(self, worker_id: str) -> None:
        self._places.give_back(worker_id)
        self._gpus.give_back(worker_id)
