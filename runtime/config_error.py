"""What is said of a wrong configuration, also by what reads none."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""
