"""Limits the calls of a server for which no credential has been accepted yet."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from baton.runtime.errors import ResourceExhausted


class UncheckedCall:
    """One call for which no credential has been accepted.

    Attributes:
        on_evict: Ends the call soon; None: the call ends by itself.
        evicted: Whether a newer call has taken its place.
    """

    __slots__ = ("_calls", "evicted", "on_evict")

    def __init__(self, calls: UncheckedCalls) -> None:
        self._calls = calls
        self.on_evict: Callable[[], None] | None = None
        self.evicted = False

    def leave(self) -> None:
        """Ends the count: a credential was accepted, or the call has ended; idempotent."""
        self.on_evict = None
        self._calls.remove(self)


class UncheckedCalls:
    """The unchecked calls of one server, in the order of their arrival.

    Such calls may be many at no cost to their caller. At the limit, a new call ends the oldest one:
    callers with a credential soon show it, so theirs is hardly ever the oldest.

    Args:
        limit: Largest number of calls.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: dict[UncheckedCall, None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self) -> UncheckedCall:
        """Counts a new call, and ends the oldest one if the limit is exceeded."""
        call = UncheckedCall(self)
        self._calls[call] = None
        if len(self._calls) > self._limit:
            oldest = next(iter(self._calls))
            del self._calls[oldest]
            oldest.evicted = True
            if oldest.on_evict is not None:
                oldest.on_evict()
        return call

    def remove(self, call: UncheckedCall) -> None:
        self._calls.pop(call, None)


def evicted_error() -> ResourceExhausted:
    """Returns the error that an evicted call ends with."""
    why = "too many calls without an accepted credential are open; newer ones took this one's place"
    return ResourceExhausted(why, reason="UNCHECKED_CALLS", retry_after_s=1.0)


CURRENT: ContextVar[UncheckedCall | None] = ContextVar("unchecked call", default=None)
"""The unchecked call that the current handler serves; None: there is nothing to check."""
