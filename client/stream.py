"""The stream of one request's events, for the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Self

from google.rpc import code_pb2

from baton.client import errors
from baton.client.client_request import ClientRequest
from baton.client.events import Completion, Event, Finished, Tokens
from baton.runtime.closing import AsyncClosing


class TokenStream(AsyncClosing):
    """The events of one request: `async for event in stream`, for one reader.

    The request is cancelled when the reader leaves: by `aclose`, by the end of an `async with`, if
    the reading task is cancelled, and if the stream is dropped (for example by a `break` out of
    `async for event in client.generate(...)`).
    """

    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._loop = asyncio.get_running_loop()

    @property
    def request_id(self) -> str:
        """The submitted ID, or the ID that the coordinator assigned; empty before that."""
        return self._request.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All output tokens received so far, including unread ones, also after a failure."""
        return tuple(self._request.token_ids)

    @property
    def address(self) -> str | None:
        """Coordinator that has accepted the request; None before that and while it resumes."""
        return self._request.address

    @property
    def num_resumes(self) -> int:
        """How often the request was resumed after its session was lost."""
        return self._request.num_resumes

    @property
    def num_buffered(self) -> int:
        """Number of received events that were not read yet."""
        return len(self._request.buffer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Returns the next event.

        Raises:
            RemoteError: The request failed; a subclass from client/errors.py.
        """
        event = await self._request.next()
        if event is None:
            raise StopAsyncIteration
        return event

    def read(self) -> Coroutine[None, None, list[Event]]:
        """Returns all buffered events, waiting for at least one; empty after the last one.

        Cheaper than `anext` for callers that forward events: one wake-up for several events.

        Raises:
            RemoteError: The request failed.
        """
        # Returns the inner coroutine, because a second one would add a cost per token. `self` is
        # passed along to keep the stream alive: dropping the stream cancels the request.
        return self._request.read(self)

    def push_to(self, push: Callable[[Tokens], bool]) -> None:
        """Lets `push` forward deltas as they arrive while `read` waits, which wakes no task.

        Cheaper than `read` alone for callers that forward events. `read` returns all other events,
        the deltas that arrived in one message with them, and the deltas that `push` did not take.

        Args:
            push: Forwards a delta and returns True; or returns False, and `read` returns the delta.
                Runs between the events of other streams, so it must be short. After an exception,
                `read` returns the delta and all later ones.
        """
        self._request.buffer.push = push

    async def complete(self) -> Completion:
        """Reads to the end and returns the complete output.

        Raises:
            RemoteError: The request failed.
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
        # A request that was cancelled early may never have been accepted.
        accepted = self._request.accepted
        model = accepted.model if accepted is not None else ""
        return Completion.of(self.request_id, model, parts, finished)

    def cancel(self) -> None:
        """Asks the coordinator to cancel; the stream then ends with Finished("cancelled")."""
        self._request.cancel()

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; idempotent."""
        self._request.abandon()

    def __del__(self) -> None:
        # The garbage collector may run in any thread. If the loop is closed, so is the session.
        if not self._request.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._request.abandon)
