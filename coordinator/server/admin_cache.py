"""The call of the Admin service that deletes KV blocks."""

from __future__ import annotations

import asyncio

from baton.coordinator.server.shell import Shell
from baton.coordinator.state.workers import Worker
from baton.runtime.config import BatonConfig
from baton.runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from baton.runtime.names import cache_salt_of
from baton.v1 import admin_pb2


class CacheCalls:
    """Deletes KV blocks on all workers.

    Args:
        shell: Reaches the workers.
        config: Says whether tenants share KV blocks.
    """

    def __init__(self, shell: Shell, config: BatonConfig) -> None:
        self._shell, self._config = shell, config

    async def drop(self, request: admin_pb2.DropCacheRequest) -> admin_pb2.DropCacheResponse:
        """Deletes KV blocks, and waits until every worker has done so or has failed.

        Raises:
            InvalidArgument: The request does not name exactly one of tenant and all.
            FailedPrecondition: Blocks belong to no tenant.
        """
        if bool(request.tenant) == request.all:
            raise InvalidArgument("tenant", request.tenant, "set either tenant or all")
        if request.tenant and self._config.kv_store.share == "all":
            raise FailedPrecondition(
                "tenants share KV blocks (kv_store.share is all), so that blocks belong to no "
                "tenant; delete all of them"
            )
        salt = None if request.all else cache_salt_of(request.tenant)
        workers = sorted(self._shell.core.workers, key=lambda one: one.id)
        found = await asyncio.gather(*(self._drop(worker, salt) for worker in workers))
        return admin_pb2.DropCacheResponse(workers=found)

    async def _drop(self, worker: Worker, salt: str | None) -> admin_pb2.WorkerCacheDropped:
        found = admin_pb2.WorkerCacheDropped(worker_id=worker.id)
        if not worker.connected:
            found.error = "the worker is not connected; its blocks were not deleted"
            return found
        try:
            report = await self._shell.cache_drops.drop(worker.key, salt)
        except BatonError as error:
            found.error = str(error)
            return found
        found.device_blocks, found.host_blocks = report.device_blocks, report.host_blocks
        found.disk_blocks = report.disk_blocks
        return found
