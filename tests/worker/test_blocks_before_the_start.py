"""The coordinator learns of the blocks on disk that an engine finds before the worker attaches."""

import pytest

from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.block_changes import CacheChange
from baton.v1 import cluster_pb2


# The second number of blocks is posted at once, that is, before the worker's Hello.
@pytest.mark.parametrize("num_blocks", [3, 300])
async def test_blocks_on_disk_that_the_warm_up_reports_are_known(
    coordinator, start_worker, monkeypatch, num_blocks
):
    found = iter([CacheChange(stored=range(1, num_blocks + 1))])
    next_step = SimulatedEngine.next_step

    async def with_disk(engine):
        step = await next_step(engine)
        step.disk_cache = next(found, None)
        return step

    monkeypatch.setattr(SimulatedEngine, "next_step", with_disk)
    start_worker()
    stream = await coordinator.stream()
    assert next(found, None) is None, "the warm-up has had the engine's first step"
    events = (await stream.next_of("cache")).cache
    while events.tier != cluster_pb2.CACHE_TIER_DISK:
        events = (await stream.next_of("cache")).cache
    assert sorted(events.stored) == list(range(1, num_blocks + 1))
