"""What a killed worker cannot remove, its transfer service does."""

import asyncio
import shutil
import socket
import tempfile

import psutil

from baton.kvtransfer import engine_stages
from baton.kvtransfer.control import TransferClient
from baton.runtime import worker_directory
from baton.runtime.config import KvTransferConfig


async def test_the_directory_of_a_killed_worker_goes_with_its_service(short_path):
    directory = short_path / f"{worker_directory.PREFIX}1"
    directory.mkdir()
    # As a killed engine leaves one.
    with socket.socket(socket.AF_UNIX) as engines:
        engines.bind(str(directory / "7df7878d-f0d9-4928-87dc-81ff3dcbb83f"))
    (directory / "vllm_dist_0d1f").write_bytes(b"by which its ranks found each other")
    (kept := short_path / "kept").mkdir()
    (kept / "kernel").write_bytes(b"compiled")
    (directory / "torchinductor_user").symlink_to(kept)
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    socket_path = str(directory / "kv.sock")
    service = await TransferClient.start(config, socket_path)
    engine_stages.note(socket_path, engine_stages.WEIGHTS)
    engine_stages.note(socket_path, engine_stages.KV)
    ended_at = engine_stages.ended_at(socket_path)
    assert 0 < ended_at[engine_stages.WEIGHTS] <= ended_at[engine_stages.KV]
    process = psutil.Process(service.pid)
    await service.close()
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=10)
    assert not directory.exists()
    assert (kept / "kernel").exists()
    assert engine_stages.ended_at(socket_path) == {}


async def test_a_directory_that_is_no_workers_stays(tmp_path):
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    service = await TransferClient.start(config, str(tmp_path / "kv.sock"))
    await service.close()
    assert tmp_path.exists()


def test_sockets_fit_whatever_the_temporary_directory_is(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 60) / ("e" * 40)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    directory = worker_directory.make()
    try:
        with socket.socket(socket.AF_UNIX) as longest:
            longest.bind(str(directory / (worker_directory.LONGEST_SOCKET_NAME_BYTES * "x")))
        assert not worker_directory.fits(deep)
    finally:
        shutil.rmtree(directory)
