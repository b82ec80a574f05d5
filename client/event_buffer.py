"""Buffer between a session, which receives the events of a request, and the request's reader."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from baton.client import errors
from baton.client.events import Event, Tokens
from baton.runtime.errors import RemoteError

_log = logging.getLogger(__name__)


class EventBuffer:
    """Events of one request that its reader has not taken yet; allows one reader at a time.

    A slow reader does not delay other requests: when `max_events` events are buffered, further
    tokens are joined to the last event.

    Attributes:
        push: Forwards a delta and returns True, or returns False: the reader must take it. None:
            the reader takes all deltas.
    """

    def __init__(self, max_events: int) -> None:
        self.push: Callable[[Tokens], bool] | None = None
        self._max_events = max_events
        self._events: deque[Event] = deque()
        # The last buffered event and the tokens after it; joined once, when they are read.
        self._overflow: list[Tokens] = []
        # Set while the reader waits for an event.
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: RemoteError | None = None
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: Event) -> None:
        """Buffers an event; `deliver` or `end` passes it to a waiting reader."""
        events = self._events
        if len(events) < self._max_events:
            events.append(event)
        elif isinstance(event, Tokens) and isinstance(last := events[-1], Tokens):
            self._overflow = self._overflow or [last]
            self._overflow.append(event)
        else:
            self._join_overflow()
            events.append(event)

    def deliver(self) -> None:
        """Delivers the events of a message to a waiting reader: forwards deltas, or wakes it.

        Called once after all events of a message. If Finished was among them, `end` has already
        woken the reader, which then reads the last delta and Finished together.
        """
        if self._waiter is None:
            return
        # A waiting reader has taken all earlier events.
        events, push = self._events, self.push
        if push is not None and not self._overflow:
            try:
                while events and isinstance(event := events[0], Tokens) and push(event):
                    events.popleft()
            except Exception:
                # The failure must not affect other requests; the reader gets this delta instead.
                _log.exception(
                    "forwarding a delta failed; the reader of the stream gets it instead"
                )
                self.push = None
        if events:
            self._wake()

    def end(self, error: RemoteError | None) -> None:
        """No further event will arrive; the reader gets `error` after what is buffered."""
        self._ended, self._error = True, error
        self._wake()

    def clear(self) -> None:
        """Drops all events, because the reader has left."""
        self._events.clear()
        self._overflow.clear()

    def arrival(self) -> asyncio.Future[None] | None:
        """Returns a future that is done when an event arrives; None: no further event will.

        Raises:
            RemoteError: The request failed.
        """
        if self._error is not None:
            # A new instance each time: raising one instance twice would extend its traceback.
            raise errors.from_baton(self._error)
        if self._ended:
            return None
        if self._waiter is not None:
            raise RuntimeError("the stream has another reader")
        self._waiter = self._loop.create_future()
        return self._waiter

    def take(self) -> Event:
        """Removes and returns the first event."""
        self._join_overflow()
        return self._events.popleft()

    def take_all(self) -> list[Event]:
        """Removes and returns all events."""
        self._join_overflow()
        found = list(self._events)
        self._events.clear()
        return found

    def _join_overflow(self) -> None:
        if self._overflow:
            self._events[-1], self._overflow = Tokens.joined(self._overflow), []

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
