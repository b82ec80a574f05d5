"""How a process introduces itself to the servers that it dials."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.runtime.tls import TlsFiles
from baton.runtime.watched_file import watched_secret

if TYPE_CHECKING:
    from baton.runtime.security_config import SecurityConfig

AUTHORIZATION = "authorization"


def _nobody() -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Dial:
    """What channels and calls need.

    Attributes:
        tls: None: without.
        server_name: what servers' certificates must name; empty: the host that is dialled.
        credential: the `authorization` of calls, "Bearer ..."; empty: none.
    """

    tls: TlsFiles | None = None
    server_name: str = ""
    credential: Callable[[], str] = _nobody

    @property
    def version(self) -> int:
        """Of the files: a channel made with older ones shows an older certificate."""
        return self.tls.version if self.tls is not None else 0

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of one call."""
        credential = self.credential()
        return ((AUTHORIZATION, credential),) if credential else ()


PLAIN = Dial()


def bearer(secret: str | Callable[[], str]) -> Callable[[], str]:
    """An API key, a JWT or a token, or what gives one, as a credential."""
    give = secret if callable(secret) else lambda: secret
    return lambda: f"Bearer {given}" if (given := give()) else ""


def within_cluster(config: SecurityConfig, *, with_tls: bool) -> Dial:
    """Of workers, who dial the coordinator and each other.

    Args:
        config: names the files.
        with_tls: whether the servers there have it.

    Raises:
        ConfigError: a file cannot be used.
    """
    tls = None
    if with_tls:
        tls = TlsFiles(config.ca_file, config.cert_file, config.key_file)
    credential = _nobody
    if path := config.cluster_token_file:
        credential = bearer(watched_secret(path, "security.cluster_token_file").get)
    return Dial(tls, config.server_name, credential)
