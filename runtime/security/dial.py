"""TLS files and credentials that a process uses when it dials a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.runtime.security.tls import TlsFiles
from baton.runtime.security.watched_file import watched_secret

if TYPE_CHECKING:
    from baton.runtime.security.security_config import SecurityConfig

AUTHORIZATION = "authorization"


def _no_credential() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Dial:
    """TLS settings and credential for outgoing channels and calls.

    Attributes:
        tls: TLS files; None means plain text.
        server_name: Name that the server's certificate must have; empty means the dialled host.
        credential: Returns the `authorization` value of calls, "Bearer ..."; empty means none.
        use_http_proxy: Whether channels use the proxy of `https_proxy` and `http_proxy`. gRPC's own
            default would send even loopback connections within a cell to it.
    """

    tls: TlsFiles | None = None
    server_name: str = ""
    credential: Callable[[], str] = _no_credential
    use_http_proxy: bool = False

    @property
    def version(self) -> int:
        """Version of the TLS files; a channel keeps the certificate of its version."""
        return self.tls.version if self.tls is not None else 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of one call: the `authorization` header, if there is a credential."""
        credential = self.credential()
        return ((AUTHORIZATION, credential),) if credential else ()


PLAIN = Dial()


def bearer(secret: str | Callable[[], str]) -> Callable[[], str]:
    """Credential from an API key, a JWT or a token, given as text or as a function."""
    give = secret if callable(secret) else lambda: secret
    return lambda: f"Bearer {given}" if (given := give()) else ""


def within_cluster(config: SecurityConfig, *, with_tls: bool) -> Dial:
    """Settings for workers, which dial the coordinator and each other.

    Args:
        config: Security section; names the files.
        with_tls: Whether the dialled servers use TLS.

    Raises:
        ConfigError: A configured file cannot be used.
    """
    tls = None
    if with_tls:
        tls = TlsFiles(config.ca_file, config.cert_file, config.key_file)
    credential = _no_credential
    if path := config.cluster_token_file:
        credential = bearer(watched_secret(path, "security.cluster_token_file").get)
    return Dial(tls, config.server_name, credential)
