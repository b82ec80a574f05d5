"""Limits how many requests of one kind are served at the same time, shared between callers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from baton.gateway.coordinator_queries import caller_name
from baton.gateway.error_responses import HttpError
from baton.runtime.fair_places import FairPlaces


class CallerSlots:
    """Slots for requests, shared between callers as FairPlaces does.

    Callers without a credential cannot be told apart and count as one.

    Args:
        limit: Number of slots.
        kind: Plural noun for the requests, for the error.
        code: Code of the error.
        most_of_caller: Number of slots that one caller with a credential can hold; None: all.
    """

    def __init__(self, limit: int, kind: str, code: str, most_of_caller: int | None = None) -> None:
        self._kind, self._code, self._most_of_caller = kind, code, most_of_caller
        self._places = FairPlaces(limit)

    def __len__(self) -> int:
        """Number of requests that hold a slot."""
        return len(self._places)

    @contextlib.contextmanager
    def hold(self, credential: str) -> Iterator[None]:
        """Holds a slot of the caller with this credential.

        Raises:
            HttpError: No slot is free for this caller (429).
        """
        caller = caller_name(credential)
        most = self._most_of_caller
        is_over = most is not None and bool(caller) and self._places.num_of(caller) >= most
        if is_over or not self._places.has_room(caller):
            num, of_caller = len(self._places), self._places.num_of(caller)
            whose = "" if of_caller == num else f", {of_caller} of them of this caller"
            raise HttpError(
                429,
                f"{num} {self._kind} are running on this gateway{whose}; no more are allowed now",
                kind="rate_limit_error",
                code=self._code,
                retry_after_s=1.0,
            )
        self._places.take(caller)
        try:
            yield
        finally:
            self._places.give_back(caller)
