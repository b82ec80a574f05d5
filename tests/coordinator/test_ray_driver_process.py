"""The coordinator's side of the Ray driver, with a replacement for the driver process."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.driver_process import DriverProcess
from baton.runtime.process.locked_directory import LockedDirectory


@pytest.fixture
def opening(tmp_path):
    (tmp_path / "ray").mkdir()
    return wire.Open(
        address="127.0.0.1:9",
        namespace="",
        runtime_env={},
        directory=str(tmp_path / "ray"),
        coordinator="127.0.0.1:9",
        command=[],
        stop_timeout_s=1.0,
        connect_timeout_s=1.0,
        placement_timeout_s=1.0,
    )


def directory_of(opening):
    return LockedDirectory(Path(opening.directory))


async def ended_driver(opening, program):
    """A driver that has closed its output and still runs."""
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", program),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    driver = DriverProcess(
        process, opening, lambda worker_exit: None, lambda *_: None, directory_of(opening)
    )
    async with asyncio.timeout(120.0):
        while not driver.ended:
            await asyncio.sleep(0.01)
    assert process.returncode is None
    return driver, process


async def test_closing_waits_for_the_end_of_a_driver_whose_output_ended_before(opening):
    driver, process = await ended_driver(opening, "exec >&-; exec sleep 600")
    async with asyncio.timeout(120.0):
        await driver.close(at_once=True)
    assert process.returncode is not None


async def test_a_driver_is_killed_if_its_closing_is_cancelled(opening, tmp_path):
    driver, process = await ended_driver(opening, "exec >&-; exec sleep 600")
    closing = asyncio.create_task(driver.close())
    await asyncio.sleep(0)
    closing.cancel()
    async with asyncio.timeout(60.0):
        await asyncio.wait([closing])
    assert closing.cancelled()
    assert process.returncode is not None
    assert os.listdir(tmp_path) == []


async def test_a_driver_that_says_nonsense_is_closed_as_any_other(opening, tmp_path):
    driver, process = await ended_driver(opening, "echo nonsense; exec sleep 600")
    async with asyncio.timeout(120.0):
        await driver.close(at_once=True)
    assert process.returncode is not None
    assert os.listdir(tmp_path) == []


async def test_a_worker_waits_for_room_until_the_driver_says_otherwise(opening, tmp_path):
    waits = [wire.Waits("d1", "no node has a GPU"), wire.Waits("d1", "")]
    said = tmp_path / "said"
    said.write_bytes(b"".join(map(wire.encode, waits)))
    process = await asyncio.create_subprocess_exec(
        *("sh", "-c", f"cat {said}; exec >&-; exec sleep 600"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        process_group=0,
    )
    heard = asyncio.Queue()
    driver = DriverProcess(
        process,
        opening,
        lambda worker_exit: None,
        lambda *one: heard.put_nowait(one),
        directory_of(opening),
    )
    async with asyncio.timeout(120.0):
        assert await heard.get() == ("d1", "waits for room in Ray: no node has a GPU")
        assert await heard.get() == ("d1", "")
        await driver.close(at_once=True)


async def test_a_driver_that_ends_leaves_no_unretrieved_exception(opening):
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
    driver, _ = await ended_driver(opening, "exec >&-; exec sleep 600")
    async with asyncio.timeout(120.0):
        await driver.close(at_once=True)
    del driver
    gc.collect()
    assert unseen == []


async def test_a_driver_that_cannot_be_started_leaves_no_directory(opening, tmp_path, monkeypatch):
    async def fail(*arguments, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    with pytest.raises(OSError, match="no more processes"):
        await DriverProcess.open(
            opening, lambda worker_exit: None, lambda *_: None, directory_of(opening)
        )
    assert os.listdir(tmp_path) == []
