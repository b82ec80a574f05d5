"""Asking a coordinator, or the first of several that answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from baton.cli import connection, options

if TYPE_CHECKING:
    from baton.client import AdminClient

T = TypeVar("T")


def call_admin(address: str | None, question: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Puts a question to the first address where a coordinator is.

    The next one is another cell, or a successor: what changes something goes there only where it
    has certainly not been done here.

    Raises:
        RemoteError: none is there, or it refuses.
    """
    from baton.cli import interrupts
    from baton.client import errors

    async def asking() -> T:
        failures = []
        for one in options.resolve_addresses(address):
            admin = connection.current().admin(one)
            try:
                async with admin:
                    return await question(admin)
            except errors.UnavailableError as error:
                if admin.may_have_acted:
                    raise
                failures.append(error)
        raise errors.combine(failures)

    return interrupts.run(asking())


def print_progress(message: str, *, as_json: bool) -> None:
    """Prints what a coordinator answered, ahead of what it comes to; JSON is only of that."""
    if not as_json:
        print(message, flush=True)


def print_answer(message: str, *, as_json: bool) -> None:
    """Prints what a coordinator answered in words."""
    from baton.cli.output import print_json

    if as_json:
        print_json({"message": message})
    else:
        print(message)
