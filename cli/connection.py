"""Options before the subcommand that say how to connect to a coordinator (TLS, API key)."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from baton.client import AdminClient, Tls

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

    def admin(self, address: str) -> AdminClient:
        """Client of the coordinator's Admin service; raises ConfigError as `tls` and `key` do."""
        from baton.client import AdminClient

        return AdminClient(address, tls=self.tls(), api_key=self.key())

    def tls(self) -> Tls | None:
        """TLS settings; None without TLS.

        Raises:
            ConfigError: Only some of the options that belong together are set.
        """
        from baton.client import Tls
        from baton.runtime.config_error import ConfigError

        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("--tls-cert and --tls-key must be set together")
        if not self.ca_file:
            if self.cert_file or self.server_name:
                raise ConfigError("--tls-cert and --tls-server-name need --tls-ca")
            return None
        names = ("--tls-ca", "--tls-cert", "--tls-key")
        return Tls(self.ca_file, self.cert_file, self.key_file, self.server_name, names)

    def key(self) -> str:
        """The API key or JWT; empty without one.

        Raises:
            ConfigError: The file cannot be read, the file or variable does not hold a key or JWT,
                or both are set.
        """
        from baton.runtime.config_error import ConfigError
        from baton.runtime.secret_format import SECRETS, is_secret
        from baton.runtime.watched_file import read_secret

        if self.api_key_file and self.api_key:
            raise ConfigError(
                "BATON_API_KEY and BATON_API_KEY_FILE are both set: unset one of them"
            )
        if not self.api_key_file:
            if self.api_key and not is_secret(self.api_key):
                raise ConfigError(f"BATON_API_KEY: must be {SECRETS}")
            return self.api_key
        try:
            return read_secret(self.api_key_file, "--api-key-file")
        except OSError as error:
            raise ConfigError(
                f"--api-key-file: {self.api_key_file} cannot be read: {error.strerror}"
            ) from None


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
