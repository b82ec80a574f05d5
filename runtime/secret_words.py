"""What API keys, JWTs and tokens are like, wherever they come from."""

from __future__ import annotations

SECRETS = "one word of printable ASCII"


def is_secret(text: str) -> bool:
    """Whether it may be a key or a token."""
    return bool(text) and fits_header(text) and " " not in text


def fits_header(text: str) -> bool:
    """Whether HTTP and gRPC carry it, as the value of `authorization` say."""
    return text.isascii() and text.isprintable()
