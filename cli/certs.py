"""`baton certs`: a CA and certificates for development."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options


def certs(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Made where it is not there.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address that servers are dialled by; repeatable."),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=options.MOST_DAYS, help="Until they expire.")
    ] = 30,
) -> None:
    """Make a CA, a server's, a client's and an operator's certificate for development.

    A CA that is in DIR already, with its key, signs again, so that this renews the others; nothing
    else is written over. For production, use your own CA: the key of this one lies beside the
    certificates.
    """
    import importlib.util

    from baton.runtime.config_error import ConfigError

    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError("baton certs needs cryptography (install baton[security])")
    from baton.runtime import dev_certs

    try:
        files = dev_certs.make(directory, hosts=host or [], days=days)
    except OSError as error:
        # A disk that is full has no file's name.
        file = error.filename or directory
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
    for file in files:
        typer.echo(str(file))
