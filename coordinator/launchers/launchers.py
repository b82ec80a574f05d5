"""Creates the launcher that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.coordinator.launchers.launcher import BATON, Launcher, LocalLauncher, OnWaits, WorkerExit
from baton.coordinator.launchers.ray_launch.launcher import RayLauncher
from baton.runtime.config import BatonConfig


def make_launcher(
    config: BatonConfig,
    coordinator: str,
    on_exit: Callable[[WorkerExit], None],
    command: Sequence[str] = BATON,
    on_waits: OnWaits = lambda worker_id, reason: None,
) -> Launcher:
    """Creates the launcher that the configuration names.

    Args:
        config: Effective configuration.
        coordinator: host:port that the workers attach to.
        on_exit: Called once for each worker that ends without being told to.
        command: Command that runs a worker; the arguments of `baton` are appended.
        on_waits: See OnWaits.

    Raises:
        ConfigError: The launcher's dependencies are not installed.
    """
    if config.launcher == "ray":
        return RayLauncher(config, coordinator, on_exit, command, on_waits)
    return LocalLauncher(config, coordinator, on_exit, command, on_waits)
