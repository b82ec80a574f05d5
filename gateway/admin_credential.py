"""The credential with which the gateway calls the Admin service for an HTTP request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_SCHEME = "bearer "
_credential: ContextVar[str] = ContextVar("credential", default="")


def current_credential() -> str:
    """Returns the API key or JWT of the HTTP request that this task serves, or ""."""
    return _credential.get()


@contextlib.contextmanager
def use_credential(authorization: str) -> Iterator[None]:
    """Sends Admin calls made inside the `with` block with an HTTP request's credential.

    The gateway has no rights of its own at the coordinator.

    Args:
        authorization: Value of the request's `authorization` header, with or without "Bearer".
    """
    is_bearer = authorization[: len(_SCHEME)].lower() == _SCHEME
    secret = authorization[len(_SCHEME) :].strip() if is_bearer else authorization.strip()
    token = _credential.set(secret)
    try:
        yield
    finally:
        _credential.reset(token)
