"""The configuration error, and the wording of its messages, in a module without other imports."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration is wrong; the message names the key, the value and what is allowed."""


def what_is_allowed(said: str) -> str:
    """Rewords a message of a pydantic error, such as "must be a valid integer"."""
    said = said.removeprefix("Value error, ").replace("Input should be", "must be")
    # The message begins with the value, so the reason for which parsing failed says nothing more.
    said, _, _ = said.partition(", unable to ")
    return said
