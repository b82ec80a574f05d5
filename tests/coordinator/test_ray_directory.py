"""The directory of a local Ray, when processes were killed that would have removed it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from baton.coordinator.launchers.launcher import LaunchError
from baton.coordinator.launchers.ray_launch import launcher, wire
from baton.coordinator.launchers.ray_launch.driver_process import DriverProcess
from baton.runtime.config import parse
from baton.runtime.process.locked_directory import LockedDirectory

WAIT_S = 120.0
# Tells instead of connecting to Ray whether the directory is locked.
DRIVER = """
import fcntl, os

from baton.coordinator.launchers.ray_launch import driver

def connect(opening):
    file = os.open(opening.directory, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise driver.Refused("locked")
    raise driver.Refused("not locked")

driver.connect = connect
driver.main()
"""


async def test_the_next_start_removes_the_directories_of_killed_processes(monkeypatch, tmp_path):
    seen = []

    async def connect(opening, on_exit, on_waits, directory):
        seen.append({one.name for one in tmp_path.iterdir()} - {directory.path.name})
        assert opening.directory == str(directory.path)
        directory.remove()
        raise LaunchError("no Ray")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(DriverProcess, "open", connect)
    monkeypatch.setattr(launcher, "DIRECTORY", str(tmp_path))
    (tmp_path / "baton-ray-killed" / "session").mkdir(parents=True)
    (tmp_path / "others").mkdir()
    (tmp_path / "baton-ray-used").mkdir()
    used = LockedDirectory(tmp_path / "baton-ray-used")
    try:
        config = parse({"launcher": "ray"}, "test")
        with pytest.raises(LaunchError, match="no Ray"):
            await launcher.RayLauncher(config, "127.0.0.1:9", lambda one: None).start(
                "p", "prefill"
            )
    finally:
        used.remove()
    assert seen == [{"others", "baton-ray-used"}]


def test_a_driver_that_outlives_its_coordinator_keeps_its_directory(tmp_path):
    pytest.importorskip("ray")
    opening = wire.Open(
        address="",
        namespace="",
        runtime_env={},
        directory=str(tmp_path),
        coordinator="127.0.0.1:9",
        command=[],
        stop_timeout_s=1.0,
        connect_timeout_s=1.0,
        placement_timeout_s=1.0,
    )
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=wire.encode(opening),
        stdout=subprocess.PIPE,
        env=os.environ,
        timeout=WAIT_S,
    )
    assert wire.decode(ended.stdout) == wire.Refused("locked")
