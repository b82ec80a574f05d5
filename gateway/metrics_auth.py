"""Access control of /metrics, which shares its port with clients' requests."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from baton.gateway.error_responses import HttpError
from baton.runtime.security.dial import bearer
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.runtime.security.watched_file import WatchedFiles, watched_secret


class MetricsAuth:
    """Checks that a scraper may read the metrics.

    Without a metrics token, anyone may read the metrics if requests need no API keys or if HTTP
    clients authenticate with certificates; otherwise the metrics are closed.

    Args:
        security: Gives the file of the metrics token.
        refusals: Counts the refused scrapes.

    Raises:
        ConfigError: The file of the token cannot be read or has invalid content.
    """

    def __init__(self, security: SecurityConfig, refusals: Refusals) -> None:
        self._refusals = refusals
        self._token: WatchedFiles[str] | None = None
        self._closed = security.has_keys and security.http_client_auth == "none"
        if path := security.metrics_token_file:
            self._token = watched_secret(path, "security.metrics_token_file")

    def check(self, headers: Mapping[str, str], peer: str) -> None:
        """Raises HttpError with status 401 if the caller may not read the metrics.

        Args:
            headers: The request's headers.
            peer: Address of the caller, for the log.
        """
        shown = headers.get("authorization", "")
        if self._token is None:
            if not self._closed:
                return
            message = "metrics need security.metrics_token_file where requests need keys"
        else:
            if hmac.compare_digest(shown.encode(), bearer(self._token.get)().encode()):
                return
            message = "metrics need the header `authorization: Bearer METRICS_TOKEN`"
        self._refusals.count("metrics", "unknown" if shown else "missing", peer=peer)
        raise HttpError(401, message, kind="authentication_error", code="invalid_api_key")
