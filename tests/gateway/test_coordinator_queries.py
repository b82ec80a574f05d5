"""What anybody may ask the coordinator through a gateway."""

import asyncio

from baton.gateway import coordinator_queries
from baton.gateway.coordinator_queries import PerCallerQuery, QueryLimiter
from baton.gateway.error_responses import HttpError


async def test_who_asks_the_same_waits_for_one_turn_together(monkeypatch):
    monkeypatch.setattr(coordinator_queries, "_QUEUE_TIMEOUT_S", 0.2)
    loop, over, query_limiter = asyncio.get_running_loop(), asyncio.Event(), QueryLimiter()
    strangers = PerCallerQuery(lambda authorization: over.wait(), 60.0, query_limiter)
    known = PerCallerQuery(lambda authorization: asyncio.sleep(0, "answer"), 60.0, query_limiter)
    taken = [asyncio.create_task(strangers.get(f"key {number}")) for number in range(32)]
    await asyncio.sleep(0)
    began_at = loop.time()
    answers = await asyncio.gather(*(known.get("ours") for _ in range(20)), return_exceptions=True)
    assert loop.time() - began_at < 2.0
    assert all(isinstance(one, HttpError) and one.status == 503 for one in answers)
    over.set()
    await asyncio.gather(*taken)
