"""Valid forms of API keys, JWTs and tokens from any source."""

from __future__ import annotations

SECRETS = "one word of printable ASCII"

# Case does not matter (RFC 9110, 11.1).
_SCHEME = "bearer "


def secret_of(authorization: str) -> str:
    """The text after "Bearer "; the whole header when it does not start with "Bearer "."""
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip()
    return authorization


def is_secret(text: str) -> bool:
    """Whether the text may be a key or a token."""
    return bool(text) and fits_header(text) and " " not in text


def fits_header(text: str) -> bool:
    """Whether HTTP and gRPC can carry the text as the value of `authorization`."""
    return text.isascii() and text.isprintable()
