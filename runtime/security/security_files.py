"""Checks the files of the `security` section without starting a server."""

from __future__ import annotations

from pathlib import Path

from baton.runtime.config_error import ConfigError
from baton.runtime.security.access import Access
from baton.runtime.security.dial import within_cluster
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import JwtConfig, SecurityConfig
from baton.runtime.security.tls import CONFIG_KEYS
from baton.runtime.security.watched_file import watched_secret

_JWT = "security.jwt.key_file"
_SECRETS = ("api_keys_file", "cluster_token_file", "metrics_token_file")


def check_present(security: SecurityConfig) -> dict[str, str]:
    """Checks the files that can be read here, as the processes of a cell do when they start.

    The three TLS files are checked together, or not at all.

    Returns:
        The paths that do not exist on this host, or that this user may not read, by configuration
        key.

    Raises:
        ConfigError: A file cannot be used.
    """
    tls = (security.ca_file, security.cert_file, security.key_file)
    named = {
        **dict(zip(CONFIG_KEYS, tls, strict=True)),
        _JWT: security.jwt.key_file,
        **{f"security.{name}": getattr(security, name) for name in _SECRETS},
    }
    missing = {key: path for key, path in named.items() if path and not _is_readable(path, key)}
    absent = {name: "" for name in _SECRETS if f"security.{name}" in missing}
    present = security.model_copy(update=absent)
    if _JWT in missing:
        present = present.model_copy(update={"jwt": JwtConfig()})
    Access(present, Refusals())
    within_cluster(present, with_tls=present.dials_tls and missing.keys().isdisjoint(CONFIG_KEYS))
    if path := present.metrics_token_file:
        watched_secret(path, "security.metrics_token_file")
    return missing


def _is_readable(path: str, key: str) -> bool:
    """Whether this user can read a file; raises ConfigError for a path that cannot exist."""
    try:
        with Path(path).open("rb"):
            return True
    except (FileNotFoundError, PermissionError):
        return False
    except OSError as error:
        raise ConfigError(f"{key}: {path!r}: {error.strerror}") from error
