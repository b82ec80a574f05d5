"""The transfer service removes the directory of a killed worker."""

import asyncio
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from baton.engine.vllm_step_targets import make_targets_file
from baton.kvtransfer import start_phases
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.runtime.process import worker_directory
from baton.runtime.process.locked_directory import LockedDirectory


async def test_the_directory_of_a_killed_worker_goes_with_its_service(short_path):
    directory = short_path / f"{worker_directory.PREFIX}1"
    directory.mkdir()
    # A killed engine leaves such a socket.
    with socket.socket(socket.AF_UNIX) as engines:
        engines.bind(str(directory / "7df7878d-f0d9-4928-87dc-81ff3dcbb83f"))
    (directory / "vllm_dist_0d1f").write_bytes(b"by which its ranks found each other")
    (kept := short_path / "kept").mkdir()
    (kept / "kernel").write_bytes(b"compiled")
    (directory / "torchinductor_user").symlink_to(kept)
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    socket_path = str(directory / "kv.sock")
    service = await TransferClient.start(config, socket_path)
    make_targets_file(socket_path)
    start_phases.record(socket_path, start_phases.WEIGHTS)
    start_phases.record(socket_path, start_phases.KV)
    ended_at = start_phases.ended_at(socket_path)
    assert 0 < ended_at[start_phases.WEIGHTS] <= ended_at[start_phases.KV]
    process = psutil.Process(service.pid)
    await service.close()
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=120)
    assert not directory.exists()
    assert (kept / "kernel").exists()
    assert start_phases.ended_at(socket_path) == {}


async def test_a_directory_of_another_kind_stays(tmp_path):
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    service = await TransferClient.start(config, str(tmp_path / "kv.sock"))
    await service.close()
    assert tmp_path.exists()


MAKER = """
import signal
from baton.runtime.process import worker_directory
directory = worker_directory.make()
(directory.path / "something").touch()
print(directory.path, flush=True)
signal.pause()
"""


def test_the_next_start_removes_directories_of_killed_workers(short_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    (others := short_path / "baton-results").mkdir()
    makers = [
        subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, living = (Path(maker.stdout.readline().strip()) for maker in makers)
    # A worker outlives its launcher while it drains.
    heir = LockedDirectory(living)
    try:
        worker_directory.make().remove()
        assert killed.exists()
        makers[0].kill()
        makers[0].wait()
        worker_directory.make().remove()
        assert not killed.exists()
        makers[1].kill()
        makers[1].wait()
        worker_directory.make().remove()
        assert living.exists()
    finally:
        heir.remove()
        for maker in makers:
            maker.kill()
            maker.wait()
            maker.stdout.close()
    assert list(short_path.iterdir()) == [others]
    with pytest.raises(FileNotFoundError):
        LockedDirectory(killed)


def test_sockets_fit_any_temporary_directory(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 40)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = worker_directory.make()
    try:
        with socket.socket(socket.AF_UNIX) as longest:
            longest.bind(str(directory.path / (worker_directory.LONGEST_SOCKET_NAME_BYTES * "x")))
        assert not worker_directory.fits(deep)
    finally:
        directory.remove()
