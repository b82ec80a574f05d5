"""Ends the work for a request when its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from baton.gateway.body_reader import ClientDisconnected

T = TypeVar("T")


async def until_disconnect(work: Awaitable[T], receive: Receive) -> T:
    """Runs `work` and returns its result; cancels it when the client leaves.

    Args:
        work: The work.
        receive: The ASGI receive function of a request whose body is read.

    Raises:
        ClientDisconnected: The client left.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.create_task(_disconnected(receive), name="watch for a client disconnect")
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
