"""Deletes KV blocks of this worker's engine on an operator's command."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.engine.base import Engine
from baton.runtime.errors import DeadlineExceeded, Internal, to_message
from baton.runtime.kv.cache_drops import DROP_TIMEOUT_S
from baton.v1 import cluster_pb2
from baton.worker.command_tasks import CommandTasks
from baton.worker.outbox import Outbox

# Maximum number of commands that run at the same time.
_MAX_DROPS = 16


class CacheDrops:
    """Executes commands to delete KV blocks; all methods are called from one event loop.

    Args:
        engine: Started engine.
        outbox: Queue for the reports.
        erase_staging: Overwrites the bytes of earlier handoffs in staging
            (TransferClient.erase_staging).
    """

    def __init__(
        self, engine: Engine, outbox: Outbox, erase_staging: Callable[[], Awaitable[None]]
    ) -> None:
        self._engine, self._outbox, self._erase_staging = engine, outbox, erase_staging
        self._tasks = CommandTasks("drop cache")

    def on_command(self, command: cluster_pb2.DropCacheCommand) -> None:
        """Starts to execute a command."""
        if len(self._tasks) >= _MAX_DROPS:
            busy = Internal(f"the worker already runs {_MAX_DROPS} commands that delete KV blocks")
            self._report(cluster_pb2.CacheDropped(drop_id=command.drop_id, failed=to_message(busy)))
            return
        self._tasks.start(self._run(command))

    async def close(self) -> None:
        """Ends the commands before the engine is stopped."""
        await self._tasks.close()

    async def _run(self, command: cluster_pb2.DropCacheCommand) -> None:
        dropped = cluster_pb2.CacheDropped(drop_id=command.drop_id)
        salt = command.cache_salt if command.HasField("cache_salt") else None
        only = command.only.hashes if command.HasField("only") else None
        try:
            async with asyncio.timeout(DROP_TIMEOUT_S):
                blocks = await self._engine.drop_cache(salt, only)
                await self._erase_staging()
            dropped.device_blocks, dropped.host_blocks = blocks.device, blocks.host
            dropped.disk_blocks = blocks.disk
            if blocks.has_files_left:
                failed = Internal("the disk has failed; files may be left in kv_store.disk_dir")
                dropped.failed.CopyFrom(to_message(failed))
        except TimeoutError:
            late = DeadlineExceeded(
                f"the worker has not deleted the KV blocks within {DROP_TIMEOUT_S:g} s"
            )
            dropped.failed.CopyFrom(to_message(late))
        except Exception as error:
            dropped.failed.CopyFrom(self._tasks.failed(error))
        self._report(dropped)

    def _report(self, dropped: cluster_pb2.CacheDropped) -> None:
        self._outbox.post(cluster_pb2.WorkerMessage(cache_dropped=dropped))
