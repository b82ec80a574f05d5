"""The end of a supervisor of worker processes."""

from __future__ import annotations

import asyncio
import importlib.util

import psutil
import pytest

from baton.coordinator.launchers import launch_supervisor
from baton.coordinator.launchers.end_with_parent import bound_to_parent
from baton.coordinator.launchers.launch_supervisor import LaunchSupervisor
from baton.coordinator.launchers.ray_launch import driver_process
from baton.coordinator.launchers.ray_launch.launcher import RayLauncher
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.revision import Revision
from baton.runtime.config import parse

WAIT_S = 60.0
NEVER_CONNECTS = ("/bin/sh", "-c", "exec sleep 600")


@pytest.fixture
def connecting(monkeypatch):
    """Replaces Ray's driver by a program that never connects; set when it was started."""
    started = asyncio.Event()

    def sleeping(*_command):
        started.set()
        return bound_to_parent(*NEVER_CONNECTS)

    monkeypatch.setattr(driver_process, "bound_to_parent", sleeping)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    return started


async def test_closing_does_not_wait_for_a_connection_to_ray(connecting, monkeypatch):
    monkeypatch.setattr(launch_supervisor, "_START_GRACE_S", 0.05)
    before = set(psutil.Process().children())
    ray = {"address": "127.0.0.1:9", "connect_timeout_s": 600.0}
    config = parse({"model": "demo", "launcher": "ray", "ray": ray}, "test")
    supervisor = LaunchSupervisor(lambda event: None)
    supervisor.use(RayLauncher(config, "127.0.0.1:9", supervisor.on_exit))
    for number in range(3):
        supervisor.start(f"decode-{number}", Pool.DECODE, Revision("r1"))
    async with asyncio.timeout(WAIT_S):
        await connecting.wait()
        # `baton up` asks its workers to end before it closes the launcher.
        for number in range(3):
            supervisor.end(f"decode-{number}")
        await supervisor.close()
    assert set(psutil.Process().children()) <= before
