"""Nothing listens beyond this host without authentication, unless told so by name."""

from __future__ import annotations

import ipaddress
import logging
from typing import NamedTuple

from baton.runtime.addresses import split_address
from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.security_config import SecurityConfig

_log = logging.getLogger(__name__)

_CLIENTS = "security.api_keys_file, security.jwt.key_file or security.client_auth: require"
_WORKERS = "security.cluster_token_file or security.client_auth: require"
_HTTP_CLIENTS = (
    "security.api_keys_file or security.jwt.key_file (the coordinator's), or "
    "security.http_client_auth: require"
)
_SCRAPERS = "security.metrics_token_file or security.client_auth: require"


def is_local(host: str) -> bool:
    """Whether only processes of this host reach what listens there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_coordinator(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when others could use the coordinator, or join as workers, unknown."""
    key = "coordinator.listen"
    _check(
        key,
        listen,
        security,
        _Callers("clients", _CLIENTS, known=security.knows_clients),
        _Callers("workers", _WORKERS, known=security.knows_workers),
    )


def check_transfer(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when others could push KV caches, unknown."""
    workers = _Callers("workers", _WORKERS, known=security.knows_workers)
    _check("kv_transfer.listen", listen, security, workers)


def check_http(listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when others could use the gateway, unknown."""
    clients = _Callers("clients", _HTTP_CLIENTS, known=security.knows_http_clients)
    _check("http.listen", listen, security, clients)


def check_metrics(key: str, listen: str, security: SecurityConfig) -> None:
    """Raises ConfigError when others could read metrics, unknown."""
    readers = _Callers("readers", _SCRAPERS, known=security.knows_scrapers)
    _check(key, listen, security, readers)


def check_all(config: BatonConfig) -> None:
    """Raises ConfigError for the first listener of a configuration that is open to others."""
    security = config.security
    check_coordinator(config.coordinator.listen, security)
    check_metrics("coordinator.metrics_listen", config.coordinator.metrics_listen, security)
    check_metrics("worker.metrics_listen", config.worker.metrics_listen, security)
    if config.kv_transfer.listen:
        check_transfer(config.kv_transfer.listen, security)
    if config.http.listen:
        check_http(config.http.listen, security)


class _Callers(NamedTuple):
    """Who calls a listener, what would tell them from others, and whether something does."""

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
                f"{key}: is {listen}, which other hosts can reach, and nothing tells its {who} "
                f"from anybody else; set {wanted}, or by name security.allow_insecure: true"
            )
    if not security.serves_tls:
        _log.warning("%s %s is open to other hosts without TLS", key, listen)
