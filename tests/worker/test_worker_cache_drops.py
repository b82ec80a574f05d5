"""A worker's part of `baton cache drop`: it reports whether its engine has deleted the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.errors import ServiceGone
from baton.runtime.config import SimulatedConfig
from baton.v1 import cluster_pb2
from baton.worker.cache_drops import CacheDrops
from baton.worker.outbox import Outbox

WAIT_S = 60.0


async def reported(
    engine, drop_id: int, erase_staging: Callable[[], Awaitable[None]]
) -> cluster_pb2.CacheDropped:
    outbox = Outbox()
    drops = CacheDrops(engine, outbox, erase_staging)
    drops.on_command(cluster_pb2.DropCacheCommand(drop_id=drop_id))
    await asyncio.wait_for(outbox.posted.wait(), WAIT_S)
    await drops.close()
    message = outbox.next_unsent()
    assert message is not None
    return message.cache_dropped


async def test_a_dead_engine_is_reported(model):
    erased = []

    async def erase() -> None:
        erased.append(True)

    engine = SimulatedEngine(model, "m", SimulatedConfig(), "")
    await engine.start()
    assert not (await reported(engine, 7, erase)).HasField("failed")
    assert erased == [True]
    await engine.stop()
    found = await reported(engine, 8, erase)
    assert found.drop_id == 8
    assert "stopped" in found.failed.message


async def test_staging_that_was_not_overwritten_is_reported(model):
    async def erase() -> None:
        raise ServiceGone("it has ended")

    engine = SimulatedEngine(model, "m", SimulatedConfig(), "")
    await engine.start()
    assert "it has ended" in (await reported(engine, 7, erase)).failed.message
    await engine.stop()
