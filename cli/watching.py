"""Following a cell: what a coordinator tells by itself, as it changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.cli.asking import ask

if TYPE_CHECKING:
    from baton.client import AdminClient
    from baton.v1.admin_pb2 import WatchEvent

_INTERVAL_S = 0.2


def follow(address: str | None, as_json: bool, show: Callable[[WatchEvent], None]) -> None:
    """Shows what a coordinator tells, again and again, until it is interrupted."""
    import sys

    async def question(admin: AdminClient) -> None:
        is_first = True
        async for event in admin.watch():
            if not as_json and sys.stdout.isatty():
                print("\x1b[H\x1b[2J", end="")
            elif not as_json and not is_first:
                print()
            is_first = False
            show(event)
            sys.stdout.flush()

    ask(address, question)


async def until(
    admin: AdminClient, done: Callable[[WatchEvent], bool], wait_s: float, what: str
) -> None:
    """Follows until something is so.

    Args:
        admin: of the coordinator.
        done: whether it is.
        wait_s: how long at most.
        what: is not so, in words.

    Raises:
        DeadlineExceeded: it takes too long.
    """
    from baton.runtime.errors import DeadlineExceeded

    try:
        async with asyncio.timeout(wait_s), contextlib.aclosing(admin.watch(_INTERVAL_S)) as events:
            async for event in events:
                if done(event):
                    return
    except TimeoutError:
        raise DeadlineExceeded(f"{what} after {wait_s:g} s") from None
