"""One request of a session: what arrives for it, and what its caller reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from google.rpc import code_pb2

from baton.client import errors, events
from baton.client.events import Completion, Event, Finished, Tokens
from baton.runtime.errors import RemoteError
from baton.v1 import common_pb2, inference_pb2


class RequestState:
    """The session's end of a request: deltas in order, a bounded buffer, everything received.

    A reader that lags costs nobody else anything: once `max_buffered_events` wait, later tokens
    join the last of them, so that the buffer is bounded by events and the tokens by the output.

    Attributes:
        request: as submitted; with `token_ids` and `num_text_chars` it is what a resume needs.
        number: of the stream in its session; 0 before it is submitted.
        on_cancel: asks the session to cancel the request at the coordinator.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        max_buffered_events: int,
        timeout_s: float | None,
    ) -> None:
        self.request = request
        self.number = 0
        self.on_cancel: Callable[[RequestState], None] | None = None
        self.accepted: events.Accepted | None = None
        self.token_ids: list[int] = []
        self.num_text_chars = 0
        self._max_buffered_events = max_buffered_events
        self._buffer: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._ended = False
        self._error: RemoteError | None = None
        self._deadline = (
            asyncio.get_running_loop().call_later(timeout_s, self._on_deadline, timeout_s)
            if timeout_s is not None
            else None
        )

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive."""
        return self._ended

    @property
    def num_buffered(self) -> int:
        """Events that wait for the reader."""
        return len(self._buffer)

    def on_event(self, event: inference_pb2.SessionEvent) -> None:
        """Takes what arrived; ends the request on its last event."""
        if self._ended:
            return
        match event.WhichOneof("event"):
            case "accepted":
                self.accepted = events.accepted(event.accepted)
                self._put(self.accepted)
            case "delta":
                self._on_delta(event.delta)
            case "finished":
                self._put(events.finished(event.finished))
                self._end(None)
            case "failed":
                self._end(errors.from_message(event.failed))

    def fail(self, error: RemoteError) -> None:
        """Ends the request with an error, after what is buffered."""
        if not self._ended:
            self._end(error)

    def cancel(self) -> None:
        """Asks the coordinator to cancel; the stream ends with Finished("cancelled")."""
        if not self._ended and self.on_cancel is not None:
            self.on_cancel(self)

    def abandon(self) -> None:
        """Nobody reads any more: cancels, and forgets what is buffered."""
        if not self._ended:
            self._give_up(errors.make(code_pb2.CANCELLED, "the stream was closed by its reader"))
        self._buffer.clear()

    async def next(self) -> Event | None:
        """The next event; None after the last.

        Raises:
            RemoteError: the request failed.
        """
        while not self._buffer:
            if self._error is not None:
                # A new instance each time: one that is raised twice grows its traceback.
                raise errors.from_baton(self._error)
            if self._ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._buffer.popleft()

    def _on_delta(self, delta: common_pb2.TokenDelta) -> None:
        num_known = len(self.token_ids) - delta.offset
        if num_known < 0:
            return self._give_up(
                errors.make(
                    code_pb2.DATA_LOSS,
                    f"tokens {len(self.token_ids)} to {delta.offset - 1} of the output are missing",
                )
            )
        if num_known > 0:
            if num_known >= len(delta.token_ids):
                return None
            if delta.text:
                return self._give_up(
                    errors.make(
                        code_pb2.DATA_LOSS,
                        f"tokens from {delta.offset} came again together with new ones: which part "
                        "of their text is new cannot be told",
                    )
                )
        tokens = events.tokens(delta, num_known)
        self.token_ids.extend(tokens.token_ids)
        self.num_text_chars += len(tokens.text)
        self._put(tokens)
        return None

    def _put(self, event: Event) -> None:
        last = self._buffer[-1] if self._buffer else None
        full = len(self._buffer) >= self._max_buffered_events
        if full and isinstance(event, Tokens) and isinstance(last, Tokens):
            self._buffer[-1] = last.joined(event)
        else:
            self._buffer.append(event)
        self._changed.set()

    def _on_deadline(self, timeout_s: float) -> None:
        message = f"no end within the request's {timeout_s:g} s"
        self._give_up(errors.make(code_pb2.DEADLINE_EXCEEDED, message))

    def _give_up(self, error: RemoteError) -> None:
        """Ends the request from this side: the coordinator is told, then it is over here."""
        on_cancel = self.on_cancel
        self._end(error)
        if on_cancel is not None:
            on_cancel(self)

    def _end(self, error: RemoteError | None) -> None:
        self._ended, self._error, self.on_cancel = True, error, None
        if self._deadline is not None:
            self._deadline.cancel()
        self._changed.set()


class TokenStream:
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
        accepted = self._state.accepted
        return accepted.request_id if accepted else self._state.request.request_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything received so far, also after a failure and ahead of what was read."""
        return tuple(self._state.token_ids)

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
        try:
            event = await self._state.next()
        except asyncio.CancelledError:
            self._state.abandon()
            raise
        if event is None:
            raise StopAsyncIteration
        return event

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
        accepted = self._state.accepted
        if finished is None or accepted is None:
            raise errors.make(code_pb2.DATA_LOSS, "the stream ended without its last event")
        return Completion(
            request_id=accepted.request_id,
            model=accepted.model,
            text="".join(part.text for part in parts),
            token_ids=tuple(token for part in parts for token in part.token_ids),
            logprobs=tuple(entry for part in parts for entry in part.logprobs),
            finished=finished,
        )

    def cancel(self) -> None:
        """Asks the coordinator to stop; what is left to read ends with Finished("cancelled")."""
        self._state.cancel()

    async def aclose(self) -> None:
        """Cancels the request unless it has ended; idempotent."""
        self._state.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # The collector may run in any thread; a closed loop has no session left to tell.
        if not self._state.ended and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._state.abandon)
