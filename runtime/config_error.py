"""The configuration error, in a module without other imports."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""
