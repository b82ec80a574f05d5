"""Requests to a coordinator without workers: it refuses them, or lets them wait."""

import asyncio

import pytest

from baton.client import Accepted, Finished
from baton.runtime.errors import RemoteError

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0


async def outcome(client, **options):
    """Returns the error of a request that is refused."""
    with pytest.raises(RemoteError) as caught:
        await client.complete([1, 2, 3], max_tokens=1, **options)
    return caught.value


async def accepted(client, **options):
    """Submits a request, and cancels it when it is accepted."""
    stream = client.generate([1, 2, 3], max_tokens=1, **options)
    events = []
    async with asyncio.timeout(WAIT_S):
        async for event in stream:
            events.append(event)
            if isinstance(event, Accepted):
                stream.cancel()
    assert [type(event) for event in events] == [Accepted, Finished]
    assert events[-1].reason == "cancelled"
