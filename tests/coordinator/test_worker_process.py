"""Worker processes whose start or stop is interrupted."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import tempfile

import pytest
import uvloop

from baton.coordinator.launchers import worker_process
from baton.coordinator.launchers.worker_process import WorkerExit, WorkerProcess


def open_pipes() -> set[str]:
    """The kernel's names of the pipes that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return {name for name in found if name.startswith("pipe:")}


@pytest.mark.parametrize("at", ["the second pipe", "the process"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "too many open files"), asyncio.CancelledError()],
    ids=["no more", "cancelled"],
)
async def test_a_failed_start_leaves_nothing(monkeypatch, tmp_path, at, error):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pipes = []

    class Pipe(worker_process._Pipe):
        @classmethod
        async def open(cls):
            if pipes and at == "the second pipe":
                raise error
            pipes.append(await super().open())
            return pipes[-1]

    async def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(worker_process, "_Pipe", Pipe)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", fail)
    before = open_pipes()
    with pytest.raises(type(error)):
        await WorkerProcess.start(
            *("w1", "prefill", "127.0.0.1:9", "", print), command=["true"], environment={}
        )
    # A transport closes its pipe in the next iteration of the event loop.
    async with asyncio.timeout(60.0):
        while open_pipes() - before:
            await asyncio.sleep(0)
    assert os.listdir(tmp_path) == []


async def test_a_worker_is_killed_if_its_stop_is_cancelled(monkeypatch, tmp_path):
    ready = tmp_path / "ready"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stubborn = f"trap '' TERM; touch {ready}; while :; do sleep 1; done"
    worker = await WorkerProcess.start(
        *("w1", "prefill", "127.0.0.1:9", "", print),
        command=["/bin/sh", "-c", stubborn],
        environment={},
    )
    async with asyncio.timeout(60.0):
        while not ready.exists():
            await asyncio.sleep(0.01)
    stopping = asyncio.create_task(worker.stop(60.0))
    await asyncio.sleep(0)
    stopping.cancel()
    async with asyncio.timeout(60.0):
        await asyncio.wait([stopping])
    assert stopping.cancelled()
    assert worker._process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["ready"]


@pytest.mark.parametrize("runner", [asyncio.run, uvloop.run])
def test_ctrl_c_never_reaches_a_worker_that_starts(monkeypatch, tmp_path, runner):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def group_after_start():
        worker = await WorkerProcess.start(
            *("w1", "prefill", "127.0.0.1:9", "", print),
            command=["/bin/sh", "-c", "exec sleep 600"],
            environment={},
        )
        try:
            return os.getpgid(worker._process.pid) == worker._process.pid
        finally:
            await worker.stop(0.0)

    # The interpreter of the new process has hardly begun to start.
    assert runner(group_after_start())


async def test_an_exit_is_reported_though_a_process_outside_the_group_holds_the_output(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_process, "_OUTPUT_TIMEOUT_S", 0.1)
    pid = tmp_path / "pid"
    leaves = f"setsid sleep 600 & echo $! > {pid}; echo no such weights >&2; exit 1"
    exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
    worker = await WorkerProcess.start(
        *("w1", "prefill", "127.0.0.1:9", "", exits.put_nowait),
        command=["/bin/sh", "-c", leaves],
        environment={},
    )
    try:
        async with asyncio.timeout(60.0):
            assert str(await exits.get()) == "worker w1 exited with code 1: no such weights"
    finally:
        await worker.stop(60.0)
        os.kill(int(pid.read_text()), signal.SIGKILL)
    assert os.listdir(tmp_path) == ["pid"]


async def test_characters_that_arrive_in_parts_are_passed_on_whole(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(worker_process, "_READ_BYTES", 1)
    exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
    worker = await WorkerProcess.start(
        *("w1", "prefill", "127.0.0.1:9", "", exits.put_nowait),
        command=["/bin/sh", "-c", "echo 'Loading: 50 % █████' >&2"],
        environment={},
    )
    async with asyncio.timeout(60.0):
        assert (await exits.get()).last_line == "Loading: 50 % █████"
    assert capsys.readouterr().err == "Loading: 50 % █████\n"
    await worker.stop(60.0)
