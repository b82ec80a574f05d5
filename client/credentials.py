"""How a client introduces itself, and whom it believes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.client import errors
from baton.runtime.dial import Dial, bearer
from baton.runtime.errors import Unauthenticated
from baton.runtime.tls import TlsFiles

# An API key or a JWT; what gives one is asked for every request, and again when that is submitted
# again, so that it may change.
ApiKey: TypeAlias = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS from files in PEM; those that change are used by the next connection.

    Attributes:
        ca_file: who signs the coordinator's certificate; empty: whom gRPC trusts by default.
        cert_file, key_file: of this client, where the coordinator asks for a certificate.
        server_name: what the coordinator's certificate must name; empty: the host that is dialled.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""


def dial(tls: Tls | None, api_key: ApiKey) -> Dial:
    """What connections are made with.

    Raises:
        ConfigError: a file cannot be used.
    """
    credential = bearer(api_key)

    def checked() -> str:
        return sendable(credential(), "api_key")

    if tls is None:
        return Dial(credential=checked)
    files = TlsFiles(tls.ca_file, tls.cert_file, tls.key_file)
    return Dial(files, tls.server_name, checked)


def sendable(credential: str, what: str) -> str:
    """The credential, which is never shown.

    Args:
        credential: "Bearer ..."; empty: none.
        what: the argument that it is.

    Raises:
        UnauthenticatedError: no credential is like that, and none could be sent.
    """
    if credential.isascii() and credential.isprintable():
        return credential
    raise errors.from_baton(
        Unauthenticated(f"{what} has characters that no credential has: must be printable ASCII")
    )
