"""What a killed worker cannot remove, its transfer service does."""

import asyncio

import psutil

from baton.kvtransfer import engine_stages
from baton.kvtransfer.control import WORKER_DIRECTORY_PREFIX, TransferClient
from baton.runtime.config import KvTransferConfig


async def test_the_directory_of_a_killed_worker_goes_with_its_service(tmp_path):
    directory = tmp_path / f"{WORKER_DIRECTORY_PREFIX}1"
    directory.mkdir()
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
    assert engine_stages.ended_at(socket_path) == {}


async def test_a_directory_that_is_no_workers_stays(tmp_path):
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    service = await TransferClient.start(config, str(tmp_path / "kv.sock"))
    await service.close()
    assert tmp_path.exists()
