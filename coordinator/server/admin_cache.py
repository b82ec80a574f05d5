"""The call of the Admin service that deletes KV blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from baton.coordinator.server.shell import Shell
from baton.coordinator.state.session_blocks import TakenSession
from baton.coordinator.state.workers import Worker
from baton.runtime.config import BatonConfig
from baton.runtime.errors import BatonError, FailedPrecondition, InvalidArgument
from baton.runtime.names import TENANT_NAMES, cache_salt_of, is_tenant
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
            InvalidArgument: The request does not name exactly one of all, a tenant, and a session,
                or no tenant can have this name.
            NotFound: No blocks of the session are known.
            FailedPrecondition: Blocks belong to no tenant.
        """
        if request.all == bool(request.tenant or request.session_id):
            raise InvalidArgument(
                "tenant", request.tenant, "set exactly one of: all, a tenant, or a session"
            )
        if request.tenant and not is_tenant(request.tenant):
            # No blocks belong to it: the answer would be that they are deleted.
            raise InvalidArgument("tenant", request.tenant, TENANT_NAMES)
        if request.session_id:
            taken = self._shell.core.take_session(request.session_id, request.tenant)
            return await self._drop_session(taken)
        if request.tenant and self._config.kv_store.share == "all":
            raise FailedPrecondition(
                "tenants share KV blocks (kv_store.share is all), so that blocks belong to no "
                "tenant; delete all of them"
            )
        salt = None if request.all else cache_salt_of(request.tenant)
        return admin_pb2.DropCacheResponse(workers=await self._drop_everywhere(salt))

    async def _drop_session(self, taken: TakenSession) -> admin_pb2.DropCacheResponse:
        share = self._config.kv_store.share
        salt = "" if share == "all" else cache_salt_of(taken.key.tenant)
        is_deleted = False
        try:
            found = await self._drop_everywhere(salt, taken.hashes)
            is_deleted = not any(one.error for one in found)
        finally:
            if not is_deleted:
                self._shell.core.put_session_back(taken)
        return admin_pb2.DropCacheResponse(workers=found, shared_blocks=taken.num_shared)

    async def _drop_everywhere(
        self, salt: str | None, only: Collection[int] | None = None
    ) -> Sequence[admin_pb2.WorkerCacheDropped]:
        workers = sorted(self._shell.core.workers, key=lambda one: one.id)
        return await asyncio.gather(*(self._drop(worker, salt, only) for worker in workers))

    async def _drop(
        self, worker: Worker, salt: str | None, only: Collection[int] | None
    ) -> admin_pb2.WorkerCacheDropped:
        found = admin_pb2.WorkerCacheDropped(worker_id=worker.id)
        if not worker.connected:
            found.error = "the worker is not connected; its blocks were not deleted"
            return found
        try:
            report = await self._shell.cache_drops.drop(worker.key, salt, only)
        except BatonError as error:
            found.error = str(error)
            return found
        found.device_blocks, found.host_blocks = report.device_blocks, report.host_blocks
        found.disk_blocks = report.disk_blocks
        return found
