"""Refuses to listen beyond this host without authentication, unless security.allow_insecure."""

from __future__ import annotations

import ipaddress
import logging
from typing import NamedTuple

from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.network.addresses import split_address
from baton.runtime.security.security_config import SecurityConfig

_log = logging.getLogger(__name__)

_CLIENTS = "security.api_keys_file, security.jwt.key_file or security.client_auth: require"
_WORKERS = "security.cluster_token_file or security.client_auth: require"
_HTTP_CLIENTS = (
    "security.api_keys_file or security.jwt.key_file (the coordinator's), or "
    "security.http_client_auth: require"
)
_SCRAPERS = "security.metrics_token_file or security.client_auth: require"


def is_local(host: str) -> bool:
    """Whether only processes of this host can reach a listener on this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_coordinator(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when unauthenticated clients or workers of other hosts could connect."""
    key = "coordinator.listen"
    _check(
        key,
        listen,
        security,
        _Callers("clients", _CLIENTS, known=security.authenticates_clients),
        _Callers("workers", _WORKERS, known=security.authenticates_workers),
    )


def check_transfer(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when unauthenticated peers of other hosts could send KV caches."""
    workers = _Callers("workers", _WORKERS, known=security.authenticates_workers)
    _check("kv_transfer.listen", listen, security, workers)


def check_http(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when unauthenticated clients of other hosts could use the gateway."""
    clients = _Callers("clients", _HTTP_CLIENTS, known=security.authenticates_http_clients)
    _check("http.listen", listen, security, clients)


def check_metrics(key: str, listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when unauthenticated readers of other hosts could read the metrics."""
    readers = _Callers("readers", _SCRAPERS, known=security.authenticates_metrics_readers)
    _check(key, listen, security, readers)


def check_all(config: BatonConfig) -> None:
    """Checks all listeners; raises ConfigError for the first one that is open to other hosts."""
    security = config.security
    check_coordinator(config.coordinator.listen, security)
    check_metrics("coordinator.metrics_listen", config.coordinator.metrics_listen, security)
    check_metrics("worker.metrics_listen", config.worker.metrics_listen, security)
    if config.kv_transfer.listen:
        check_transfer(config.kv_transfer.listen, security)
    if config.http.listen:
        check_http(config.http.listen, security)


class _Callers(NamedTuple):
    """A group of callers, the keys that would authenticate it, and whether one of them is set."""

    who: str
    wanted: str
    known: bool


def _check(key: str, listen: str, security: SecurityConfig, *callers: _Callers) -> None:
    host, _ = split_address(listen, key)
    if is_local(host):
        return
    for who, wanted, known in callers:
        if not known and not security.allow_insecure:
            raise ConfigError(
                f"{key}: is {listen}, which other hosts can reach, and its {who} are not "
                f"authenticated; set {wanted}, or explicitly security.allow_insecure: true"
            )
    if not security.serves_tls:
        _log.warning("%s %s is open to other hosts without TLS", key, listen)
