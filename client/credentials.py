"""How a client introduces itself, and whom it believes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.client import errors
from baton.runtime.dial import Dial, bearer
from baton.runtime.errors import RemoteError, Unauthenticated
from baton.runtime.secret_format import SECRETS, fits_header, is_secret
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
        names: what errors call the three files.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    names: tuple[str, str, str] = ("tls.ca_file", "tls.cert_file", "tls.key_file")


def dial(tls: Tls | None, api_key: ApiKey) -> Dial:
    """What connections are made with.

    Raises:
        ConfigError: a file cannot be used.
    """

    def checked() -> str:
        key = api_key() if callable(api_key) else api_key
        if key and not is_secret(key):
            raise _unlike_any("api_key", SECRETS)
        return key

    credential = bearer(checked)
    if tls is None:
        return Dial(credential=credential)
    files = TlsFiles(tls.ca_file, tls.cert_file, tls.key_file, names=tls.names)
    return Dial(files, tls.server_name, credential)


def sendable(authorization: str) -> str:
    """A credential as it is sent, "Bearer ...", which is never shown.

    Raises:
        UnauthenticatedError: it cannot be sent.
    """
    if not fits_header(authorization):
        raise _unlike_any("authorization", "printable ASCII")
    return authorization


def _unlike_any(what: str, allowed: str) -> RemoteError:
    message = f"{what} has characters that no credential has: must be {allowed}"
    return errors.from_baton(Unauthenticated(message))
