"""Commands to delete KV blocks: each waits for its worker's report, or for the worker's loss."""

from __future__ import annotations

import asyncio

import pytest

from baton.coordinator.server import cache_drops
from baton.coordinator.server.cache_drops import CacheDrops
from baton.runtime.errors import Internal, RemoteError, Unavailable, to_message
from baton.v1 import cluster_pb2

A, B = ("a", 1), ("b", 2)


class Sent:
    """Commands that were sent, by worker."""

    def __init__(self) -> None:
        self.commands: dict[tuple[str, int], cluster_pb2.DropCacheCommand] = {}
        self.drops = CacheDrops(self.commands.__setitem__)

    async def begin(
        self, worker: tuple[str, int], salt: str | None, only: tuple[int, ...] | None = None
    ) -> asyncio.Task:
        task = asyncio.create_task(self.drops.drop(worker, salt, only))
        while worker not in self.commands:
            await asyncio.sleep(0)
        return task

    def report(self, worker: tuple[str, int], **fields) -> None:
        drop_id = self.commands[worker].drop_id
        self.drops.on_report(worker, cluster_pb2.CacheDropped(drop_id=drop_id, **fields))


async def test_each_worker_reports_its_own():
    sent = Sent()
    first, second = await sent.begin(A, "search"), await sent.begin(B, None)
    assert sent.commands[A].cache_salt == "search"
    assert not sent.commands[B].HasField("cache_salt")
    assert not sent.commands[B].HasField("only")
    # The default tenant's salt is empty, which is not the same as no salt.
    third = await sent.begin(("c", 3), "")
    assert sent.commands["c", 3].HasField("cache_salt")
    sent.drops.on_report(A, cluster_pb2.CacheDropped(drop_id=sent.commands[B].drop_id))
    sent.report(B, host_blocks=4)
    sent.report(A, disk_blocks=5)
    sent.report(A, disk_blocks=6)
    assert (await first).disk_blocks == 5
    assert (await second).host_blocks == 4
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    # No block is not the same as any block.
    for worker, only in ((("d", 4), ()), (("e", 5), (7, 9))):
        fourth = await sent.begin(worker, "search", only)
        assert sent.commands[worker].HasField("only")
        assert tuple(sent.commands[worker].only.hashes) == only
        sent.report(worker)
        await fourth
    # A late report is ignored.
    sent.report(("c", 3))


async def test_many_blocks_are_deleted_by_several_commands(monkeypatch):
    monkeypatch.setattr(cache_drops, "MAX_HASHES", 4)
    sent, found = Sent(), []
    task = await sent.begin(A, "search", range(10))
    while not task.done():
        if (command := sent.commands.pop(A, None)) is not None:
            found.append(list(command.only.hashes))
            sent.drops.on_report(
                A, cluster_pb2.CacheDropped(drop_id=command.drop_id, host_blocks=len(found[-1]))
            )
        await asyncio.sleep(0)
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert (await task).host_blocks == 10


async def test_a_failure_and_a_lost_worker_are_told():
    sent = Sent()
    first, second = await sent.begin(A, None), await sent.begin(B, None)
    sent.drops.lost(A, "it fell silent")
    sent.report(B, failed=to_message(Internal("the disk has failed")))
    with pytest.raises(Unavailable, match=r"a was lost: it fell silent; .* files may be left"):
        await first
    with pytest.raises(RemoteError, match="the disk has failed"):
        await second
