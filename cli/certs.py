"""`baton certs`: a CA and certificates for development."""

from __future__ import annotations

import importlib.util
from typing import Annotated

import typer

from baton.cli import options
from baton.runtime.config_error import ConfigError


def certs(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="Directory for the files; it is created if it does not exist."
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Name or address under which clients connect to the servers; repeatable.",
        ),
    ] = None,
    days: Annotated[
        int,
        typer.Option(
            "--days",
            min=1,
            max=options.MOST_DAYS,
            help="Number of days until the certificates expire.",
        ),
    ] = 30,
) -> None:
    """Make a CA and certificates for development.

    The certificates are for servers, a client and an operator. If DIR already has a CA with its
    key, that CA signs new certificates, so running the command again renews them. The CA itself is
    never overwritten. For production, use your own CA: here the CA's key lies beside the
    certificates.
    """
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("baton certs needs cryptography (install baton[security])")
    # Imported here, because it needs the library that was just looked for.
    from baton.runtime.security import dev_certs

    try:
        files = dev_certs.make(directory, hosts=host or [], days=days)
    except OSError as error:
        # The error of a full disk names no file.
        file = error.filename or directory
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    for file in files:
        typer.echo(str(file))
