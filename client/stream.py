"""What the caller of a request reads."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Self

from google.rpc import code_pb2

from baton.client import errors
from baton.client.events import Completion, Event, Finished, Tokens
from baton.client.request_state import RequestState
from baton.runtime.closing import AsyncClosing


class TokenStream(AsyncClosing):
    """The events of one request: `async for event in stream`, by one reader.

    Leaving is enough to cancel: `aclose`, the end of an `async with`, a cancelled task that reads,
    and dropping the stream (as `break` out of `async for event in client.generate(...)` does).
    """

    def __init__(self, state: RequestState) -> None:
        self._state = state
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """As submitted, or as the coordinator assigned it; empty until it did."""
        return self._state.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything received so far, also after a failure and ahead of what was read."""
        return tuple(self._state.token_ids)

    @property
    def address(self) -> str | None:
        """Of the coordinator that has accepted it; None while none has, first or again."""
        is_with_one = self._state.accepted is not None and not self._state.resuming
        return self._state.address if is_with_one else None

    @property
    def num_resumes(self) -> int:
        """How often the request went on at a coordinator after its session was lost."""
        return self._state.num_resumes

    @property
    def num_buffered(self) -> int:
        """Events received and not read."""
        return self._state.num_buffered

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """The next event.

        Raises:
            RemoteError: the request failed; a subclass from client/errors.py.
        """
        event = await self._state.next()
        if event is None:
            raise StopAsyncIteration
        return event

    def read(self) -> Coroutine[None, None, list[Event]]:
        """All events that are there, waiting for one; empty after the last.

        For who passes them on: at one wake-up for whatever has come together.

        Raises:
            RemoteError: the request failed.
        """
        # Not a coroutine around the other one: that would cost again with every token. The stream
        # goes along, or one that nobody else holds would be dropped, and so cancelled.
        return self._state.read(self)

    async def complete(self) -> Completion:
        """Reads to the end and returns the whole answer.

        Raises:
            RemoteError: the request failed.
        """
        parts: list[Tokens] = []
        finished: Finished | None = None
        async for event in self:
            if isinstance(event, Tokens):
                parts.append(event)
            elif isinstance(event, Finished):
                finished = event
        if finished is None:
            raise errors.make(code_pb2.DATA_LOSS, "the stream ended without its last event")
        # Cancelled soon enough, it was never accepted.
        accepted = self._state.accepted
        model = accepted.model if accepted is not None else ""
        return Completion.of(self.request_id, model, parts, finished)

    def cancel(self) -> None:
        """Asks the coordinator to stop; what is left to read ends with Finished("cancelled")."""
        self._state.cancel()

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; idempotent."""
        self._state.abandon()

    def __del__(self) -> None:
        # The collector may run in any thread; a closed loop has no session left to tell.
        if not self._state.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._state.abandon)
