"""Follows the events that a coordinator streams when the state of its cell changes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import stat
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from google.rpc import code_pb2

from baton.cli.admin_calls import call_admin
from baton.client import AdminClient, errors
from baton.runtime.errors import DeadlineExceeded
from baton.v1.admin_pb2 import WatchEvent

# Shortest time between two events of a wait, and of a command that prints each event.
_WAIT_INTERVAL_S, _PRINT_INTERVAL_S = 0.2, 1.0
# Number of connections in a row that may break before an event arrives. gRPC may begin a call over
# a connection that is breaking.
_MAX_LOST_CONNECTIONS = 3
_STDOUT = 1


def follow_changes(address: str | None, as_lines: bool, show: Callable[[WatchEvent], None]) -> None:
    """Shows every event of a coordinator until the command is interrupted.

    A connection that breaks is replaced; the first event of the new one may repeat the last one.

    Args:
        address: Address of the coordinator; see `call_admin`.
        as_lines: Whether each event adds lines; otherwise it replaces the screen of a terminal.
        show: Prints an event.
    """

    async def question(admin: AdminClient) -> None:
        is_first = True
        async with (
            _watch_stdout(),
            contextlib.aclosing(_events(admin, _PRINT_INTERVAL_S)) as events,
        ):
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
async def _watch_stdout() -> AsyncIterator[None]:
    """Raises BrokenPipeError in its block when the reader of standard output closes the pipe.

    A command that waits for a change writes nothing, so it would not notice the closed pipe.
    """
    is_pipe = stat.S_ISFIFO(os.fstat(_STDOUT).st_mode)
    # A pipe that this process can also read always has a reader, and reports unread data instead.
    if not is_pipe or fcntl.fcntl(_STDOUT, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY:
        yield
        return
    loop = asyncio.get_running_loop()

    def on_left() -> None:
        loop.remove_reader(_STDOUT)
        left.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as left:
            # For the writing end of a pipe the event loop reports only errors.
            loop.add_reader(_STDOUT, on_left)
            try:
                yield
            finally:
                loop.remove_reader(_STDOUT)
    except TimeoutError:
        if not left.expired():
            raise
        raise BrokenPipeError(errno.EPIPE, "the reader of standard output has gone") from None


async def wait_until(
    admin: AdminClient,
    done: Callable[[WatchEvent], bool],
    wait_s: float,
    what: str,
    problem: Callable[[WatchEvent], str] = lambda _: "",
) -> WatchEvent:
    """Waits for an event that fulfils a condition, and returns that event.

    Args:
        admin: Client of the coordinator.
        done: The condition.
        wait_s: Longest wait in seconds.
        what: Clause for errors that names the change that is missing, such as "w1 has not left".
        problem: Returns what an event says about the reason of a delay; empty: nothing.

    Raises:
        DeadlineExceeded: The condition was not fulfilled within `wait_s`.
        RemoteError: No connection to the coordinator could be opened, or several in a row broke.
    """
    reason = ""
    try:
        async with (
            asyncio.timeout(wait_s),
            contextlib.aclosing(_events(admin, _WAIT_INTERVAL_S)) as events,
        ):
            async for event in events:
                if done(event):
                    return event
                reason = problem(event)
            message = f"the coordinator at {admin.address} ended the event stream"
            raise errors.make(code_pb2.UNAVAILABLE, message)
    except TimeoutError:
        late = f"{what} after {wait_s:g} s" + (f": {reason}" if reason else "")
        message = f"{late}; the coordinator continues the change"
        raise DeadlineExceeded(message) from None
    except errors.UnavailableError as error:
        message = f"{error}; {what} yet, but the coordinator has received the command"
        raise errors.make(error.code, message, error.details()) from None


async def _events(admin: AdminClient, min_interval_s: float) -> AsyncGenerator[WatchEvent, None]:
    """Yields a coordinator's events, over a new connection if one breaks.

    A connection breaks, for example, if the coordinator is too busy to answer a keepalive ping.

    Args:
        admin: Client of the coordinator.
        min_interval_s: Shortest time between two events, in seconds.

    Raises:
        RemoteError: No connection could be opened, or several in a row broke before an event.
    """
    num_lost = 0
    while True:
        try:
            async with contextlib.aclosing(admin.watch(min_interval_s)) as events:
                async for event in events:
                    num_lost = 0
                    yield event
            return
        except errors.ConnectionLostError:
            num_lost += 1
            if num_lost > _MAX_LOST_CONNECTIONS:
                raise
        await asyncio.sleep(_WAIT_INTERVAL_S)
