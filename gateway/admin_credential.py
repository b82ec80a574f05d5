"""Whose question to the Admin service the gateway is passing on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_SCHEME = "bearer "
_credential: ContextVar[str] = ContextVar("credential", default="")


def current_credential() -> str:
    """The API key or JWT of who asks; empty: none."""
    return _credential.get()


@contextlib.contextmanager
def use_credential(authorization: str) -> Iterator[None]:
    """What is asked inside is asked with an HTTP request's credential, and no rights of our own."""
    is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
    secret = authorization[len(_SCHEME) :].strip() if is_bearer else authorization.strip()
    token = _credential.set(secret)
    try:
        yield
    finally:
        _credential.reset(token)
