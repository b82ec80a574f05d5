"""What a killed worker cannot remove, its transfer service does."""

import asyncio

import psutil

from baton.kvtransfer.control import WORKER_DIRECTORY_PREFIX, TransferClient
from baton.runtime.config import KvTransferConfig


async def test_the_directory_of_a_killed_worker_goes_with_its_service(tmp_path):
    directory = tmp_path / f"{WORKER_DIRECTORY_PREFIX}1"
    directory.mkdir()
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    service = await TransferClient.start(config, str(directory / "kv.sock"))
    process = psutil.Process(service.pid)
    await service.close()
    await asyncio.to_thread(psutil.wait_procs, [process], timeout=10)
    assert not directory.exists()


async def test_a_directory_that_is_no_workers_stays(tmp_path):
    config = KvTransferConfig(send_bytes=2**20, receive_bytes=2**20)
    service = await TransferClient.start(config, str(tmp_path / "kv.sock"))
    await service.close()
    assert tmp_path.exists()
