"""Ray actor that owns one worker's process on a Ray node."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import yaml

from baton.coordinator.launchers.worker_process import BATON, WorkerExit, WorkerProcess
from baton.runtime.process import output_streams


class WorkerActor:
    """Owns one worker process, which ends together with the actor's process.

    Args:
        worker_id, role, coordinator: Arguments of the worker.
        config: Effective configuration as YAML.
        command: Command that runs the worker; empty: `baton` of the node's environment.
        environment: Variables added to the actor's environment.
    """

    def __init__(
        self,
        worker_id: str,
        role: str,
        coordinator: str,
        config: str,
        command: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        self._worker_id, self._role, self._coordinator = worker_id, role, coordinator
        self._config, self._command, self._environment = config, command, environment
        self._process: WorkerProcess | None = None
        self._ended: asyncio.Future[WorkerExit] | None = None
        self._starting = asyncio.Lock()
        self._is_stopped = False

    async def place(self) -> dict[str, str]:
        """Location of the actor: "node" is Ray's node ID, "host" is the host name."""
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "host": socket.gethostname()}

    async def start(self, node: str) -> None:
        """Starts the process, unless `stop` was called before."""
        config = yaml.safe_load(self._config)
        labels = config["worker"].get("labels", {})
        config["worker"]["labels"] = {**labels, "ray_node": node}
        self._ended = asyncio.get_running_loop().create_future()
        async with self._starting:
            if self._is_stopped:
                return
            self._process = await WorkerProcess.start(
                self._worker_id,
                self._role,
                self._coordinator,
                yaml.safe_dump(config),
                self._ended.set_result,
                command=self._command or BATON,
                environment=self._environment,
            )

    async def exited(self) -> dict[str, Any]:
        """Waits until the process ends without being told to; returns its WorkerExit's fields."""
        assert self._ended is not None, "start comes first"
        ended = await asyncio.shield(self._ended)
        await asyncio.to_thread(output_streams.flush)
        return dataclasses.asdict(ended)

    async def stop(self, stop_timeout_s: float) -> None:
        """Ends the process with its children, and prevents a later start."""
        async with self._starting:
            self._is_stopped = True
        if self._process is not None:
            await self._process.stop(stop_timeout_s)
        # The driver kills this process next.
        await asyncio.to_thread(output_streams.flush)

    async def coordinator(self) -> str:
        """host:port that the worker attaches to."""
        return self._coordinator
