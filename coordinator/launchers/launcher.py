"""Interface of launchers, and the launcher that starts workers on this host."""

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

# Time to close the engine and leave the coordinator, in addition to the worker's drain timeout.
STOP_MARGIN_S = 10.0


class LaunchError(OSError, BatonError):
    """A worker cannot be started now; the message is one line."""


OnWaits: TypeAlias = Callable[[str, str], None]
"""Callback with a worker ID and the reason why the worker cannot be started yet. The reason follows
"worker w1 ..."; it is empty when the wait is over."""


class Launcher(Protocol):
    """Starts and stops workers; they report everything else over their attach streams."""

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        """Starts a worker in a role, "prefill" or "decode"; returns before it serves.

        Args:
            worker_id: ID of the worker, unique in the cluster.
            role: "prefill" or "decode".
            revision: launch configuration of the worker; None: the configured one.

        Raises:
            OSError: The worker cannot be started.
            ConfigError: The revision contradicts the configuration.
        """
        ...

    async def end(self, worker_id: str) -> None:
        """Drains a worker and returns when all its processes have ended; idempotent.

        Must be called for every started worker, including workers that have ended by themselves.
        """
        ...

    async def stop(self) -> None:
        """Stops all workers and returns when all their processes have ended; idempotent."""
        ...


class LocalLauncher:
    """Runs workers as child processes on this host; see WorkerProcess.

    Args:
        config: Effective configuration, which is passed to the workers as a whole.
        coordinator: host:port that the workers attach to.
        on_exit: Called once for each worker that ends without being told to.
        command: Command that runs a worker; the arguments of `baton` are appended.
        on_waits: See OnWaits.
    """

    def __init__(
        self,
        config: BatonConfig,
        coordinator: str,
        on_exit: Callable[[WorkerExit], None],
        command: Sequence[str] = BATON,
        on_waits: OnWaits = lambda worker_id, reason: None,
    ) -> None:
        self._coordinator, self._on_exit, self._command = coordinator, on_exit, command
        self._on_waits = on_waits
        self._places = CorePlaces(config)
        self._gpus = GpuPlaces(gpus_here() if config.engine == "vllm" else [])
        self._children: dict[str, WorkerProcess] = {}
        # A worker's drain timeout plus the time for its shutdown.
        self._stop_timeout_s = config.worker.drain_timeout_s + STOP_MARGIN_S

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        config = self._places.config if revision is None else revision.over(self._places.config)
        pool = config.prefill if role == "prefill" else config.decode
        num_ranks = config.num_ranks(pool)
        environment = self._places.take(worker_id, num_ranks)
        environment |= self._gpus.take(worker_id, num_ranks)
        try:
            await self._wait_for_gpus(worker_id)
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
            self._places.ends(worker_id)
            self._gpus.ends(worker_id)
            try:
                await child.stop(self._stop_timeout_s)
                self._children.pop(worker_id, None)
            finally:
                self._give_back(worker_id)

    async def stop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker_id in list(self._children):
                group.create_task(self.end(worker_id))

    async def _wait_for_gpus(self, worker_id: str) -> None:
        """Waits until the workers that are ending have left the GPUs of this worker."""
        if blocked_by := self._gpus.blocked_by(worker_id):
            others = ", ".join(blocked_by)
            self._on_waits(worker_id, f"waits for GPUs, until these workers have ended: {others}")
            await self._gpus.unblocked(worker_id)
            self._on_waits(worker_id, "")

    def _give_back(self, worker_id: str) -> None:
        self._places.give_back(worker_id)
        self._gpus.give_back(worker_id)
