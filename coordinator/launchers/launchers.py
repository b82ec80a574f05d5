"""Which launcher starts the workers."""

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
    """The launcher that the configuration names.

    Args:
        config: effective.
        coordinator: host:port that workers attach to.
        on_exit: told once of each worker that ends without being asked to.
        command: what runs a worker; the arguments of `baton` follow.
        on_waits: see OnWaits; on this host none waits.

    Raises:
        ConfigError: it cannot be had.
    """
    if config.launcher == "ray":
        return RayLauncher(config, coordinator, on_exit, command, on_waits)
    return LocalLauncher(config, coordinator, on_exit, command)
