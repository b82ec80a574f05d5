"""Options before the subcommand that say how to connect to a coordinator (TLS, API key)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated

import typer

TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        envvar="BATON_TLS_CA",
        metavar="FILE",
        help="PEM file of the CA that signs the coordinator's certificate; turns TLS on.",
    ),
]
TlsCert = Annotated[
    str,
    typer.Option(
        "--tls-cert",
        envvar="BATON_TLS_CERT",
        metavar="FILE",
        help="PEM file of this client's certificate.",
    ),
]
TlsKey = Annotated[
    str,
    typer.Option(
        "--tls-key",
        envvar="BATON_TLS_KEY",
        metavar="FILE",
        help="PEM file of the private key for --tls-cert.",
    ),
]
TlsServerName = Annotated[
    str,
    typer.Option(
        "--tls-server-name",
        envvar="BATON_TLS_SERVER_NAME",
        metavar="NAME",
        help="Name in the coordinator's certificate, if it differs from the host in --address.",
    ),
]
ApiKeyFile = Annotated[
    str,
    typer.Option(
        "--api-key-file",
        envvar="BATON_API_KEY_FILE",
        metavar="FILE",
        help="File with an API key or a JWT; the variable BATON_API_KEY holds the key itself.",
    ),
]
# Hidden, so that keys are not passed as arguments: other users can read a process's arguments.
ApiKeyVariable = Annotated[str, typer.Option("--api-key", envvar="BATON_API_KEY", hidden=True)]


@dataclass(frozen=True, slots=True)
class Connection:
    """Values of the connection options."""

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    api_key_file: str = ""
    api_key: str = ""


_current: ContextVar[Connection | None] = ContextVar("connection", default=None)


@contextmanager
def used(connection: Connection) -> Iterator[None]:
    """Makes `current` return this connection inside the `with` block; tests run many commands."""
    before = _current.set(connection)
    try:
        yield
    finally:
        _current.reset(before)


def current() -> Connection:
    """Connection options of the running command."""
    return _current.get() or Connection()
