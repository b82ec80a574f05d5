"""Following a cell: what a coordinator tells by itself, as it changes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from baton.cli.admin_calls import call_admin

if TYPE_CHECKING:
    from baton.client import AdminClient
    from baton.v1.admin_pb2 import WatchEvent

_INTERVAL_S = 0.2
_STDOUT = 1


def follow_changes(address: str | None, as_lines: bool, show: Callable[[WatchEvent], None]) -> None:
    """Shows what a coordinator tells, again and again, until it is interrupted.

    Args:
        address: of the coordinator.
        as_lines: what is shown goes on from event to event, and is not drawn anew.
        show: shows an event.
    """
    import sys

    async def question(admin: AdminClient) -> None:
        is_first = True
        async with _reader(), contextlib.aclosing(admin.watch()) as events:
            async for event in events:
                if not as_lines and sys.stdout.isatty():
                    print("\x1b[H\x1b[2J", end="")
                elif not as_lines and not is_first:
                    print()
                is_first = False
                show(event)
                sys.stdout.flush()

    call_admin(address, question)


@contextlib.asynccontextmanager
async def _reader() -> AsyncIterator[None]:
    """Raises BrokenPipeError when nobody reads what is printed any more.

    Who waits for a change does not write, and would not notice.
    """
    is_pipe = stat.S_ISFIFO(os.fstat(_STDOUT).st_mode)
    # One that is open for reading too always has a reader, and tells of what it holds.
    if not is_pipe or fcntl.fcntl(_STDOUT, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_left() -> None:
        loop.remove_reader(_STDOUT)
        left.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as left:
            # Of a pipe's end for writing this tells of errors alone.
            loop.add_reader(_STDOUT, on_left)
            try:
                yield
            finally:
                loop.remove_reader(_STDOUT)
    except TimeoutError:
        if not left.expired():
            raise
        raise BrokenPipeError(errno.EPIPE, "nobody reads any more") from None


async def wait_until(
    admin: AdminClient, done: Callable[[WatchEvent], bool], wait_s: float, what: str
) -> WatchEvent:
    """Follows until something is so, and returns what it was told of then.

    Args:
        admin: of the coordinator.
        done: whether it is.
        wait_s: how long at most.
        what: is not so, in words.

    Raises:
        DeadlineExceeded: it takes too long.
        RemoteError: the coordinator is lost.
    """
    from google.rpc import code_pb2

    from baton.client import errors
    from baton.runtime.errors import DeadlineExceeded

    try:
        async with asyncio.timeout(wait_s), contextlib.aclosing(admin.watch(_INTERVAL_S)) as events:
            async for event in events:
                if done(event):
                    return event
            message = f"the coordinator at {admin.address} tells nothing more"
            raise errors.make(code_pb2.UNAVAILABLE, message)
    except TimeoutError:
        message = f"{what} after {wait_s:g} s; it was asked for, and goes on"
        raise DeadlineExceeded(message) from None
    except errors.UnavailableError as error:
        message = f"{error}; {what} yet, but it was asked for"
        raise errors.make(error.code, message, error.details()) from None
