"""TLS files and API key of the running command, from its connection options."""

from __future__ import annotations

from baton.cli import connection
from baton.client import Tls
from baton.runtime.config_error import ConfigError
from baton.runtime.security.secret_format import SECRETS, is_secret
from baton.runtime.security.watched_file import read_secret


def tls() -> Tls | None:
    """Returns the TLS settings; None without TLS.

    Raises:
        ConfigError: Only some of the options that belong together are set.
    """
    given = connection.current()
    if bool(given.cert_file) != bool(given.key_file):
        raise ConfigError("--tls-cert and --tls-key must be set together")
    if not given.ca_file:
        if given.cert_file or given.server_name:
            raise ConfigError("--tls-cert and --tls-server-name need --tls-ca")
        return None
    names = ("--tls-ca", "--tls-cert", "--tls-key")
    return Tls(given.ca_file, given.cert_file, given.key_file, given.server_name, names)


def api_key() -> str:
    """Returns the API key or JWT; empty without one.

    Raises:
        ConfigError: The file cannot be read, the file or variable does not hold a key or JWT, or
            both are set.
    """
    given = connection.current()
    if given.api_key_file and given.api_key:
        raise ConfigError("BATON_API_KEY and BATON_API_KEY_FILE are both set: unset one of them")
    if not given.api_key_file:
        if given.api_key and not is_secret(given.api_key):
            raise ConfigError(f"BATON_API_KEY: must be {SECRETS}")
        return given.api_key
    try:
        return read_secret(given.api_key_file, "--api-key-file")
    except OSError as error:
        raise ConfigError(
            f"--api-key-file: {given.api_key_file} cannot be read: {error.strerror}"
        ) from None
