"""The coordinator's end of the Ray driver, with a process in its place."""

from __future__ import annotations

import asyncio

from baton.coordinator.ray_launch import wire
from baton.coordinator.ray_launch.driver_process import DriverProcess


async def test_closing_waits_for_the_end_of_a_driver_whose_output_ended_before(tmp_path):
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", "exec >&-; exec sleep 60"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    opening = wire.Open(
        address="127.0.0.1:9",
        namespace="",
        runtime_env={},
        directory=str(tmp_path / "ray"),
        coordinator="127.0.0.1:9",
        command=[],
        patience_s=1.0,
        placement_timeout_s=1.0,
    )
    driver = DriverProcess(process, opening, lambda worker_exit: None, lambda *_: None)
    async with asyncio.timeout(20.0):
        while not driver.ended:
            await asyncio.sleep(0.01)
        assert process.returncode is None
        await driver.close(at_once=True)
    assert process.returncode is not None
