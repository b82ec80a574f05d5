"""Calls of the Admin service at the first coordinator that answers, and their printed results."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

from baton.cli import credentials, interrupts, options
from baton.cli.output import print_json, print_text
from baton.client import AdminClient, errors
from baton.runtime.config_error import ConfigError
from baton.runtime.errors import RemoteError

T = TypeVar("T")


def call_admin(address: str | None, question: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Runs a call against the first coordinator that answers.

    The next address may be another cell or a successor of the coordinator. A call that changes
    something is repeated there only when it certainly had no effect at the address before.

    Args:
        address: Value of --address: addresses separated by commas; None for the default.
        question: Makes the call with the client that it gets.

    Raises:
        RemoteError: No coordinator answers, or the coordinator refuses the call.
        ConfigError: An argument of the call is not valid UTF-8.
    """

    async def asking() -> T:
        failures = []
        for one in options.resolve_addresses(address):
            admin = AdminClient(one, tls=credentials.tls(), api_key=credentials.api_key())
            try:
                async with admin:
                    return await question(admin)
            except RemoteError as error:
                if admin.may_have_acted or not errors.has_no_answer(error):
                    raise
                failures.append(errors.as_unavailable(error))
        raise errors.combine(failures)

    try:
        return interrupts.run(asking())
    except UnicodeEncodeError as error:
        # Python represents other bytes of the command line as surrogates.
        raise ConfigError(f"{error.object!r}: must be valid UTF-8") from None


def print_progress(message: str, *, as_json: bool) -> None:
    """Prints the coordinator's first answer before a wait; JSON output has only the result."""
    if not as_json:
        print_text(message)
        sys.stdout.flush()


def print_answer(message: str, *, as_json: bool) -> None:
    """Prints the coordinator's answer, a sentence, as text or as JSON."""
    if as_json:
        print_json({"message": message})
    else:
        print_text(message)
