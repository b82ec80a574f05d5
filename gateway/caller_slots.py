"""Limits how many requests of one kind are served at the same time, in all and per caller."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from baton.gateway.coordinator_queries import caller_digest
from baton.gateway.error_responses import HttpError


class CallerSlots:
    """Slots for requests; a caller can hold a quarter of them, so that others find free ones.

    Callers without a credential cannot be told apart. They may hold all slots.

    Args:
        limit: Number of slots.
        kind: Plural noun for the requests, for the error.
        code: Code of the error.
    """

    def __init__(self, limit: int, kind: str, code: str) -> None:
        self._limit, self._kind, self._code = limit, kind, code
        # Slots that are taken, by the caller's digest.
        self._taken: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def hold(self, credential: str) -> Iterator[None]:
        """Holds a slot of the caller with this credential.

        Raises:
            HttpError: All slots, or all of this caller, are taken (429).
        """
        caller = caller_digest(credential)
        if self._taken.total() >= self._limit:
            raise self._full(f"{self._limit} {self._kind} are running on this gateway, its limit")
        most = max(1, self._limit // 4)
        if credential and self._taken[caller] >= most:
            raise self._full(
                f"{most} {self._kind} of this caller are running on this gateway, its limit for "
                "one caller"
            )
        self._taken[caller] += 1
        try:
            yield
        finally:
            self._taken[caller] -= 1
            if not self._taken[caller]:
                del self._taken[caller]

    def _full(self, message: str) -> HttpError:
        kind = "rate_limit_error"
        return HttpError(429, message, kind=kind, code=self._code, retry_after_s=1.0)
