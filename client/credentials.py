"""Credentials and TLS settings of a client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from baton.client import errors
from baton.runtime.errors import RemoteError, Unauthenticated
from baton.runtime.security.dial import Dial, bearer
from baton.runtime.security.secret_format import SECRETS, fits_header, is_secret
from baton.runtime.security.tls import TlsFiles

# An API key or a JWT, or a function that returns one. The client calls the function for every
# submission and resubmission, so that the credential may change.
ApiKey: TypeAlias = str | Callable[[], str]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings with PEM files; each new connection uses the files' current content.

    Attributes:
        ca_file: Certificates of the authorities that the client trusts; empty: gRPC's default.
        cert_file: Certificate of this client, if the coordinator requires one.
        key_file: Private key of this client.
        server_name: Name that the coordinator's certificate must have; empty: the dialled host.
        names: Names of the three files in error messages.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    names: tuple[str, str, str] = ("tls.ca_file", "tls.cert_file", "tls.key_file")


def dial(tls: Tls | None, api_key: ApiKey, *, use_http_proxy: bool = False) -> Dial:
    """Returns the settings with which connections are opened.

    Raises:
        ConfigError: A TLS file cannot be used.
    """

    def checked() -> str:
        key = api_key() if callable(api_key) else api_key
        if key and not is_secret(key):
            raise _invalid_credential("api_key", SECRETS)
        return key

    credential = bearer(checked)
    if tls is None:
        return Dial(credential=credential, use_http_proxy=use_http_proxy)
    files = TlsFiles(tls.ca_file, tls.cert_file, tls.key_file, names=tls.names)
    return Dial(files, tls.server_name, credential, use_http_proxy)


def sendable(authorization: str) -> str:
    """Returns the credential ("Bearer ...") if gRPC can send it; errors never contain it.

    Raises:
        UnauthenticatedError: The credential has characters that cannot be sent.
    """
    if not fits_header(authorization):
        raise _invalid_credential("authorization", "printable ASCII")
    return authorization


def _invalid_credential(field: str, allowed: str) -> RemoteError:
    message = f"{field} has characters that a credential must not have: must be {allowed}"
    return errors.from_baton(Unauthenticated(message))
