"""Workers through Ray: one actor per worker, by way of a driver process (driver_process.py)."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from baton.coordinator.launchers.cpu_cores import CorePlaces
from baton.coordinator.launchers.launcher import STOP_MARGIN_S, LaunchError, OnWaits
from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.driver_process import DriverProcess
from baton.coordinator.launchers.worker_process import BATON, WorkerExit
from baton.coordinator.state.revision import Revision
from baton.runtime.config import BatonConfig, dump
from baton.runtime.config_error import ConfigError

# An own Ray has Unix sockets there: in a longer path they would not fit.
DIRECTORY, PREFIX = "/tmp", "baton-ray-"


class RayLauncher:
    """Workers in a Ray cluster, or in a Ray of one's own on this host.

    Connects with the first start, and again when Ray was lost. Ray restarts nothing: a lost actor
    or node shows as its worker's exit.

    Args:
        config: the effective configuration, handed on whole; `ray` says where and with what.
        coordinator: host:port that workers attach to.
        on_exit: told once of each worker that ends without being asked to.
        command: what runs a worker on its node; BATON: what runs it there.
        on_waits: see OnWaits.

    Raises:
        ConfigError: Ray is not installed.
    """

    def __init__(
        self,
        config: BatonConfig,
        coordinator: str,
        on_exit: Callable[[WorkerExit], None],
        command: Sequence[str] = BATON,
        on_waits: OnWaits = lambda worker_id, reason: None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "launcher: is 'ray', which is not installed; install baton[ray], or use 'local'"
            )
        config = _with_whole_paths(config)
        self._places = None if config.ray.address else CorePlaces(config)
        self._config = config if self._places is None else self._places.config
        self._coordinator, self._on_exit, self._on_waits = coordinator, on_exit, on_waits
        self._command = [] if command == BATON else list(command)
        self._driver: DriverProcess | None = None
        self._connecting = asyncio.Lock()
        # Why there was no connection the last time that there was none.
        self._failure: Exception | None = None

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        """Raises LaunchError; see Launcher."""
        config = self._config
        if revision is not None:
            config = _with_whole_paths(revision.over(config))
        start = start_of(worker_id, role, config, self._config)
        driver = await self._connected()
        # On other hosts it is theirs to say what binds an engine.
        if self._places is not None:
            environment = self._places.take(worker_id, start.num_ranks)
            start = replace(start, environment=environment)
        try:
            await driver.start_worker(start)
        except BaseException:
            if self._places is not None:
                self._places.give_back(worker_id)
            raise

    async def end(self, worker_id: str) -> None:
        if self._driver is not None:
            await self._driver.end_worker(worker_id)
        if self._places is not None:
            self._places.give_back(worker_id)

    async def stop(self) -> None:
        async with self._connecting:
            driver, self._driver = self._driver, None
            if driver is not None:
                await driver.close()

    async def _connected(self) -> DriverProcess:
        failure = self._failure
        async with self._connecting:
            if self._driver is not None and self._driver.ended:
                await self._driver.close()
                self._driver = None
            if self._driver is None:
                if self._failure is not failure:
                    # Those who waited for it meanwhile would take as long again, one by one.
                    raise LaunchError(str(self._failure))
                try:
                    self._driver = await DriverProcess.open(
                        self._opening(),
                        self._on_exit,
                        self._on_waits,
                        self._config.ray.connect_timeout_s,
                    )
                except Exception as error:
                    self._failure = error
                    raise
            return self._driver

    def _opening(self) -> wire.Open:
        ray = self._config.ray
        return wire.Open(
            address=ray.address,
            namespace=ray.namespace,
            runtime_env=ray.runtime_env,
            directory="" if ray.address else tempfile.mkdtemp(prefix=PREFIX, dir=DIRECTORY),
            coordinator=self._coordinator,
            command=self._command,
            stop_timeout_s=self._config.worker.drain_timeout_s + STOP_MARGIN_S,
            placement_timeout_s=ray.placement_timeout_s,
        )


def _with_whole_paths(config: BatonConfig) -> BatonConfig:
    """Actors run in directories of Ray's choice."""
    adapters = {name: _absolute(path) for name, path in config.lora_adapters.items()}
    return config.model_copy(update={"model": _absolute(config.model), "lora_adapters": adapters})


def _absolute(model: str) -> str:
    """Of a local directory the whole path; what else names a model stays."""
    path = Path(model)
    return str(path.absolute()) if path.is_dir() else model


def start_of(worker_id: str, role: str, config: BatonConfig, configured: BatonConfig) -> wire.Start:
    """What the driver is told of a worker, but for its environment.

    Args:
        worker_id: of the worker.
        role: "prefill" or "decode".
        config: the worker's own.
        configured: the coordinator's. The GPUs that `ray` names are those of a worker of its size.
    """
    num_ranks, usual = _num_ranks(config, role), _num_ranks(configured, role)
    takes = configured.ray.prefill if role == "prefill" else configured.ray.decode
    gpus = takes.gpus
    if gpus is not None and num_ranks and usual:
        gpus *= num_ranks / usual
    return wire.Start(
        worker_id,
        role,
        cpus=takes.cpus,
        gpus=gpus,
        num_ranks=num_ranks,
        resources=takes.resources,
        environment={},
        config=dump(config),
    )


def _num_ranks(config: BatonConfig, role: str) -> int:
    """That would use a GPU each."""
    if config.engine != "vllm":
        return 0
    return config.num_ranks(config.prefill if role == "prefill" else config.decode)
