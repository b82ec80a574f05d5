"""Deletes KV blocks on workers, for an operator."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence

from baton.coordinator.state.requests import WorkerKey
from baton.runtime.errors import BatonError, DeadlineExceeded, Unavailable, from_message
from baton.runtime.kv.cache_drops import DROP_TIMEOUT_S
from baton.v1 import cluster_pb2

# Maximum number of block hashes in one command, because a command is one message. More hashes are
# divided among several commands.
MAX_HASHES = 2**17
# Longer than the worker's own timeout, so that the worker's report of it arrives first.
_TIMEOUT_S = DROP_TIMEOUT_S + 5.0


class CacheDrops:
    """Commands to delete KV blocks that workers have not answered yet. Not thread-safe.

    Args:
        send: Sends a command to a worker.
    """

    def __init__(self, send: Callable[[WorkerKey, cluster_pb2.DropCacheCommand], None]) -> None:
        self._send = send
        self._waiting: dict[tuple[WorkerKey, int], asyncio.Future[cluster_pb2.CacheDropped]] = {}

    async def drop(
        self, worker: WorkerKey, cache_salt: str | None, only: Collection[int] | None = None
    ) -> cluster_pb2.CacheDropped:
        """Deletes KV blocks of a worker.

        Args:
            worker: an attached worker.
            cache_salt: delete only blocks of requests with this salt; None: all blocks.
            only: delete only blocks that also have one of these hashes; None: with any hash.

        Returns:
            The worker's report.

        Raises:
            BatonError: The worker may have blocks left.
        """
        if only is None:
            return await self._drop(worker, cache_salt, None)
        total, hashes = cluster_pb2.CacheDropped(), list(only)
        # At least one command is sent, even without hashes: it also makes the worker delete the
        # blocks whose owner is unknown.
        for begin in range(0, max(1, len(hashes)), MAX_HASHES):
            batch = hashes[begin : begin + MAX_HASHES]
            report = await self._drop(worker, cache_salt, batch)
            total.device_blocks += report.device_blocks
            total.host_blocks += report.host_blocks
            total.disk_blocks += report.disk_blocks
        return total

    async def _drop(
        self, worker: WorkerKey, cache_salt: str | None, only: Sequence[int] | None
    ) -> cluster_pb2.CacheDropped:
        drop_id = secrets.randbits(63) | 1
        reported = asyncio.get_running_loop().create_future()
        self._waiting[worker, drop_id] = reported
        try:
            command = cluster_pb2.DropCacheCommand(drop_id=drop_id, cache_salt=cache_salt)
            if only is not None:
                command.only.CopyFrom(cluster_pb2.BlockHashes(hashes=only))
            self._send(worker, command)
            async with asyncio.timeout(_TIMEOUT_S):
                report: cluster_pb2.CacheDropped = await reported
        except TimeoutError:
            late = f"worker {worker[0]} has not deleted its blocks within {_TIMEOUT_S:g} s"
            raise DeadlineExceeded(late) from None
        finally:
            del self._waiting[worker, drop_id]
        if report.HasField("failed"):
            raise from_message(report.failed)
        return report

    def on_report(self, worker: WorkerKey, report: cluster_pb2.CacheDropped) -> None:
        """Handles a worker's report; ignores reports that no command waits for."""
        waiting = self._waiting.get((worker, report.drop_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(report)

    def lost(self, worker: WorkerKey, why: str) -> None:
        """Fails the commands of a lost worker."""
        for (key, _), waiting in self._waiting.items():
            if key == worker and not waiting.done():
                waiting.set_exception(_lost(worker, why))


def _lost(worker: WorkerKey, why: str) -> BatonError:
    return Unavailable(
        f"worker {worker[0]} was lost: {why}; its device and host memory are gone, but files may "
        "be left in kv_store.disk_dir"
    )
