"""Who may read the gateway's metrics, which share a port with everybody's requests."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from baton.gateway.error_responses import HttpError
from baton.runtime.dial import bearer
from baton.runtime.refusals import Refusals
from baton.runtime.security_config import SecurityConfig
from baton.runtime.watched_file import WatchedFiles, watched_secret


class MetricsAuth:
    """Knows the metrics token.

    Without one metrics are open where all of HTTP is, and where clients have shown certificates.

    Raises:
        ConfigError: the token's file cannot be used.
    """

    def __init__(self, security: SecurityConfig, refusals: Refusals) -> None:
        self._refusals = refusals
        self._token: WatchedFiles[str] | None = None
        self._closed = security.has_keys and security.http_client_auth == "none"
        if path := security.metrics_token_file:
            self._token = watched_secret(path, "security.metrics_token_file")

    def check(self, headers: Mapping[str, str], peer: str) -> None:
        """Raises HttpError, 401, where somebody may not read them."""
        shown = headers.get("authorization", "")
        if self._token is None:
            if not self._closed:
                return
            what = "metrics need security.metrics_token_file where requests need keys"
        else:
            if hmac.compare_digest(shown.encode(), bearer(self._token.get)().encode()):
                return
            what = "metrics need the metrics token: authorization: Bearer TOKEN"
        self._refusals.count("metrics", "unknown" if shown else "missing", peer=peer)
        raise HttpError(401, what, kind="authentication_error", code="invalid_api_key")
