"""Starts workers through Ray: one actor per worker, by a driver process (driver_process.py)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from baton.coordinator.launchers.cpu_cores import CorePlaces
from baton.coordinator.launchers.launcher import STOP_MARGIN_S, LaunchError, OnWaits
from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.driver_process import DriverProcess
from baton.coordinator.launchers.worker_process import BATON, WorkerExit
from baton.coordinator.state.revision import Revision
from baton.runtime.config import BatonConfig, dump
from baton.runtime.config_error import ConfigError
from baton.runtime.process import locked_directory
from baton.runtime.process.locked_directory import LockedDirectory
from baton.runtime.section import Section

_Section = TypeVar("_Section", bound=Section)

# Directory of a local Ray. The path is short because the path length of Unix sockets is limited.
DIRECTORY, PREFIX = "/tmp", "baton-ray-"
# Fields of the section `security` with files that workers read.
_SECURITY_FILES = ("ca_file", "cert_file", "key_file", "cluster_token_file", "metrics_token_file")


class RayLauncher:
    """Runs workers in a Ray cluster, or in a local Ray on this host.

    The launcher connects at the first start, and again if Ray was lost. Ray restarts no actor: the
    loss of an actor or of a node is reported as the exit of its worker.

    Args:
        config: Effective configuration, which is passed to the workers as a whole; its section
            `ray` configures the connection and the resources.
        coordinator: host:port that the workers attach to.
        on_exit: Called once for each worker that ends without being told to.
        command: Command that runs a worker on its node; BATON: `baton` of the node's environment.
        on_waits: See OnWaits.

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
        config = _with_absolute_paths(config)
        self._places = None if config.ray.address else CorePlaces(config)
        self._config = config if self._places is None else self._places.config
        self._coordinator, self._on_exit, self._on_waits = coordinator, on_exit, on_waits
        self._command = [] if command == BATON else list(command)
        self._driver: DriverProcess | None = None
        self._connecting = asyncio.Lock()
        # Reason of the last failed connection.
        self._failure: Exception | None = None

    async def start(self, worker_id: str, role: str, revision: Revision | None = None) -> None:
        """Raises LaunchError; see Launcher."""
        config = self._config
        if revision is not None:
            config = _with_absolute_paths(revision.over(config))
        start = start_of(worker_id, role, config, self._config)
        driver = await self._connected_driver()
        # Cores are assigned only on this host; other nodes bind engines by their own environment.
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
        if self._places is not None:
            self._places.ends(worker_id)
        if self._driver is not None:
            await self._driver.end_worker(worker_id)
        if self._places is not None:
            self._places.give_back(worker_id)

    async def stop(self) -> None:
        async with self._connecting:
            driver, self._driver = self._driver, None
            if driver is not None:
                await driver.close()

    async def _connected_driver(self) -> DriverProcess:
        failure = self._failure
        async with self._connecting:
            if self._driver is not None and self._driver.ended:
                await self._driver.close()
                self._driver = None
            if self._driver is None:
                if self._failure is not failure:
                    # A connection attempt failed while this call waited for the lock. If each
                    # waiting call tried again, the last one would wait for the sum of all timeouts.
                    raise LaunchError(str(self._failure))
                try:
                    directory = None if self._config.ray.address else _new_directory()
                    self._driver = await DriverProcess.open(
                        self._open_message(directory),
                        self._on_exit,
                        self._on_waits,
                        directory,
                    )
                except Exception as error:
                    self._failure = error
                    raise
            return self._driver

    def _open_message(self, directory: LockedDirectory | None) -> wire.Open:
        ray, start_timeout_s = self._config.ray, self._config.scaling.start_timeout_s
        return wire.Open(
            address=ray.address,
            namespace=ray.namespace,
            runtime_env=ray.runtime_env,
            directory="" if directory is None else str(directory.path),
            coordinator=self._coordinator,
            command=self._command,
            stop_timeout_s=self._config.worker.drain_timeout_s + STOP_MARGIN_S,
            connect_timeout_s=ray.connect_timeout_s,
            placement_timeout_s=ray.placement_timeout_s or start_timeout_s,
        )


def _new_directory() -> LockedDirectory:
    """Makes the directory of a local Ray; removes those of killed coordinators and drivers."""
    return locked_directory.make(Path(DIRECTORY), PREFIX)


def _with_absolute_paths(config: BatonConfig) -> BatonConfig:
    """Makes local paths absolute, because Ray chooses the actors' working directories.

    If `ray.runtime_env` gives the actors a directory with files, relative paths of files may be
    names in that directory, and stay.
    """
    adapters = {name: _absolute(path) for name, path in config.lora_adapters.items()}
    changes: dict[str, object] = {"model": _absolute(config.model), "lora_adapters": adapters}
    if "working_dir" not in config.ray.runtime_env:
        changes["security"] = _with_absolute_files(config.security, _SECURITY_FILES)
        changes["kv_store"] = _with_absolute_files(config.kv_store, ("disk_dir",))
    return config.model_copy(update=changes)


def _absolute(model: str) -> str:
    """Absolute path of a local model directory; other model names are unchanged."""
    path = Path(model)
    return str(path.absolute()) if path.is_dir() else model


def _with_absolute_files(section: _Section, names: Iterable[str]) -> _Section:
    """Copy of a section with absolute paths in these fields; empty ones stay empty."""
    paths = {name: path for name in names if (path := getattr(section, name))}
    return section.model_copy(
        update={name: str(Path(path).absolute()) for name, path in paths.items()}
    )


def start_of(worker_id: str, role: str, config: BatonConfig, configured: BatonConfig) -> wire.Start:
    """Creates the start message of a worker, with an empty environment.

    Args:
        worker_id: ID of the worker.
        role: "prefill" or "decode".
        config: configuration of the worker.
        configured: configuration of the coordinator. `ray.*.gpus` is the number for a worker with
            this configuration; it is scaled if the worker has another number of ranks.
    """
    num_ranks, configured_ranks = _num_ranks(config, role), _num_ranks(configured, role)
    needs = configured.ray.prefill if role == "prefill" else configured.ray.decode
    gpus = needs.gpus
    if gpus is not None and num_ranks and configured_ranks:
        gpus *= num_ranks / configured_ranks
    return wire.Start(
        worker_id,
        role,
        cpus=needs.cpus,
        gpus=gpus,
        num_ranks=num_ranks,
        resources=needs.resources,
        environment={},
        config=dump(config),
    )


def _num_ranks(config: BatonConfig, role: str) -> int:
    """Number of engine ranks that would use one GPU each."""
    if config.engine != "vllm":
        return 0
    return config.num_ranks(config.prefill if role == "prefill" else config.decode)
