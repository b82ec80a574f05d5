"""Calls for which no credential has been accepted."""

from __future__ import annotations

import asyncio

from baton.runtime.security import guard
from baton.runtime.security.unchecked_calls import UncheckedCalls


class Silent:
    """The context of a call whose message never arrives."""

    async def read(self):
        await asyncio.Event().wait()


async def test_a_call_whose_time_is_over_can_be_evicted_in_the_same_moment():
    """The newer call that evicts it must not fail."""
    calls = UncheckedCalls(1)
    first = calls.add()
    reading = asyncio.create_task(guard._read(Silent(), first, 0.001))
    while first.on_evict is None:
        await asyncio.sleep(0)
    evict = first.on_evict
    # The timeout has cancelled the task, which has not run since.
    while not reading.cancelling():
        await asyncio.sleep(0)
    evict()
    assert await reading is None
