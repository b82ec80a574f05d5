"""One request as its session sees it: what arrives, what its reader gets, what a resume needs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from google.rpc import code_pb2

from baton.client import errors, events
from baton.client.events import Event, Finished, Tokens
from baton.client.resume import MAX_FRUITLESS_LOSSES, not_resumed
from baton.runtime.errors import RemoteError
from baton.v1 import common_pb2, inference_pb2

_LEAST_TIMEOUT_S = 1e-3


class RequestState:
    """Deltas in order, a bounded buffer, everything received.

    A reader that lags costs nobody else anything: once `max_buffered_events` wait, later tokens
    join the last of them, so that the buffer is bounded by events and the tokens by the output.

    Args:
        request: as it is submitted first.
        max_buffered_events: as above.
        timeout_s: None: it has no deadline.
        retry_timeout_s: in which it is submitted again when it is refused.
        credential: gives its `authorization` anew when it is submitted again: the one that it came
            with may have expired. None: it keeps that.

    Attributes:
        number: of the stream in its session.
        address: of the coordinator that it was submitted to last; empty: to none yet.
        on_cancel: tells whoever holds the request that it is cancelled, or over (`ended`).
        accepted: the first one.
        resuming: it lost its session, and no coordinator has accepted it since.
        num_resumes: how often it was accepted again.
        num_refusals: of the resubmission, in a row.
        cancel_asked: by its reader.
        ended: nothing more will arrive.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        max_buffered_events: int,
        timeout_s: float | None,
        retry_timeout_s: float = 0.0,
        credential: Callable[[], str] | None = None,
    ) -> None:
        self._request, self._credential = request, credential
        self.number, self.address = 0, ""
        self.on_cancel: Callable[[RequestState], None] | None = None
        self.accepted: events.Accepted | None = None
        self.resuming = False
        self.num_resumes = 0
        self.num_refusals = 0
        self.cancel_asked = False
        self.token_ids: list[int] = []
        self._num_text_chars = 0
        self._revision = ""
        self._num_fruitless_losses = 0
        self._cause: RemoteError | None = None
        self._max_buffered_events = max_buffered_events
        self._buffer: deque[Event] = deque()
        # The last of them and what came after it, to be joined: once, however much it is.
        self._late: list[Tokens] = []
        # Of the reader, while it waits.
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False
        self._error: RemoteError | None = None
        self._loop = asyncio.get_running_loop()
        self._retry_by = self._loop.time() + retry_timeout_s if retry_timeout_s else None
        self._retried = False
        self._resume_by: asyncio.TimerHandle | None = None
        self._deadline = (
            self._loop.call_later(timeout_s, self._on_deadline, timeout_s)
            if timeout_s is not None
            else None
        )

    @property
    def request_id(self) -> str:
        """As submitted, or as the coordinator assigned it; empty until it did."""
        return self.accepted.request_id if self.accepted else self._request.request_id

    @property
    def model(self) -> str:
        """As submitted, or as the coordinator said; empty: the base model, until it did."""
        return self.accepted.model if self.accepted else self._request.model

    @property
    def num_buffered(self) -> int:
        """Events that wait for the reader."""
        return len(self._buffer)

    @property
    def resume_left_s(self) -> float:
        """What is left of the time in which it must be accepted again."""
        return self._resume_by.when() - self._loop.time() if self._resume_by is not None else 0.0

    @property
    def may_retry(self) -> bool:
        """Whether it wants to be submitted again when it is refused; once admitted, it resumes."""
        return self._retry_by is not None and self.accepted is None

    @property
    def retry_left_s(self) -> float:
        """What is left of the time in which a refused request is submitted again."""
        if self._retry_by is None:
            return 0.0
        deadline = self._deadline.when() if self._deadline is not None else self._retry_by
        return min(self._retry_by, deadline) - self._loop.time()

    def retry(self) -> None:
        """It is to be submitted again, with the time that it has left then."""
        self._retried = True

    def message(self) -> inference_pb2.GenerateRequest:
        """The request as it is to be sent now: with the tokens and the time it has."""
        if not self.resuming and not self._retried:
            return self._request
        if self._credential is not None:
            # Where it fails, the last one may still do.
            with contextlib.suppress(Exception):
                self._request.authorization = self._credential() or self._request.authorization
        message = inference_pb2.GenerateRequest()
        message.CopyFrom(self._request)
        if self.accepted is not None:
            message.request_id = self.accepted.request_id
            message.model = self.accepted.model
        if self.token_ids:
            message.resume.token_ids.extend(self.token_ids)
            message.resume.num_text_chars = self._num_text_chars
            message.resume.revision = self._revision
        if self._deadline is not None:
            left_s = max(_LEAST_TIMEOUT_S, self._deadline.when() - self._loop.time())
            message.timeout.FromMicroseconds(round(left_s * 1e6))
        return message

    def on_event(self, event: inference_pb2.SessionEvent) -> None:
        """Takes what arrived; ends the request on its last event."""
        if self.ended:
            return
        match event.WhichOneof("event"):
            case "delta":
                self._on_delta(event.delta)
            case "accepted":
                self._on_accepted(events.accepted(event.accepted))
            case "finished":
                self._put(events.finished(event.finished))
                self._end(None)
            case "failed":
                self._end(errors.from_message(event.failed))

    def lose(self, error: RemoteError, resume_timeout_s: float, *, counts: bool = True) -> None:
        """Its session is gone: it is to be resumed, or ends here.

        Args:
            error: how the session ended.
            resume_timeout_s: in which it must be accepted again; 0: it fails.
            counts: whether a request that was accepted before may be what ended it.
        """
        if self.ended:
            return
        self.on_cancel = None
        self._cause = error
        self._num_fruitless_losses += counts or self.accepted is None
        if self.cancel_asked:
            self.finish_cancelled()
        elif not resume_timeout_s:
            self._end(error)
        elif self._num_fruitless_losses > MAX_FRUITLESS_LOSSES:
            times = f"{self._num_fruitless_losses} sessions without a new token"
            self._end(errors.make(error.code, f"the request lost {times}, the last one: {error}"))
        elif not self.resuming:
            self.resuming, self.num_refusals = True, 0
            self._resume_by = self._loop.call_later(
                resume_timeout_s, self._on_resume_timeout, resume_timeout_s
            )

    def delay_resume(self, cause: RemoteError) -> None:
        """Says why it is not resumed yet."""
        self._cause = cause

    def fail(self, error: RemoteError) -> None:
        """Ends the request with an error, after what is buffered."""
        if not self.ended:
            self._end(error)

    def cancel(self) -> None:
        """Asks the coordinator to cancel; the stream ends with Finished("cancelled")."""
        if not self.ended and self.on_cancel is not None:
            self.cancel_asked = True
            self.on_cancel(self)

    def finish_cancelled(self) -> None:
        """Ends the request as a coordinator does that cancels it: there is none to ask."""
        if self.ended:
            return
        num_prompt_tokens = self.accepted.prompt_tokens if self.accepted else 0
        usage = events.Usage(num_prompt_tokens, len(self.token_ids), 0)
        budget = events.budget(common_pb2.LatencyBudget())
        self._put(Finished("cancelled", "", usage, budget))
        self._end(None)

    def abandon(self) -> None:
        """Nobody reads any more: cancels, and forgets what is buffered."""
        if not self.ended:
            self._give_up(errors.make(code_pb2.CANCELLED, "the stream was closed by its reader"))
        self._buffer.clear()
        self._late.clear()

    async def next(self) -> Event | None:
        """The next event; None after the last. For one reader at a time, whose end is a cancel.

        Raises:
            RemoteError: the request failed.
        """
        while not self._buffer:
            if (arrival := self._arrival()) is None:
                return None
            try:
                await arrival
            except asyncio.CancelledError:
                self.abandon()
                raise
        self._join_late()
        return self._buffer.popleft()

    async def read(self, reader: object = None) -> list[Event]:
        """All that is there, at least one event; empty after the last. Otherwise as `next`.

        Args:
            reader: is kept alive until then.
        """
        while not self._buffer:
            if (arrival := self._arrival()) is None:
                return []
            try:
                await arrival
            except asyncio.CancelledError:
                self.abandon()
                raise
        self._join_late()
        found = list(self._buffer)
        self._buffer.clear()
        return found

    def _arrival(self) -> asyncio.Future[None] | None:
        """Done when something has come; None: nothing more will. Raises as `next` does."""
        if self._error is not None:
            # A new instance each time: one that is raised twice grows its traceback.
            raise errors.from_baton(self._error)
        if self.ended:
            return None
        if self._waiter is not None:
            raise RuntimeError("the stream has another reader")
        self._waiter = self._loop.create_future()
        return self._waiter

    def _on_accepted(self, accepted: events.Accepted) -> None:
        first = self.accepted
        if first is None:
            self.accepted = accepted
            self._put(accepted)
        elif (accepted.model, accepted.prompt_tokens) != (first.model, first.prompt_tokens):
            now = f"{accepted.prompt_tokens} prompt tokens for model {accepted.model!r}"
            then = f"{first.prompt_tokens} for {first.model!r}"
            message = f"this coordinator would continue another request: {now}, not {then}"
            cause = errors.make(code_pb2.FAILED_PRECONDITION, message)
            return self._give_up(not_resumed(cause))
        if self.resuming:
            self.resuming = False
            self.num_resumes += 1
            self._stop_resume_timer()
        return None

    def _on_delta(self, delta: common_pb2.TokenDelta) -> None:
        self._revision = delta.revision or self._revision
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
        self._num_text_chars += len(tokens.text)
        self._num_fruitless_losses = 0
        self._put(tokens)
        return None

    def _put(self, event: Event) -> None:
        buffer = self._buffer
        is_full = len(buffer) >= self._max_buffered_events
        if is_full and isinstance(event, Tokens) and isinstance(last := buffer[-1], Tokens):
            self._late = self._late or [last]
            self._late.append(event)
        else:
            self._join_late()
            buffer.append(event)
        if self._waiter is not None:
            self._wake()

    def _join_late(self) -> None:
        if self._late:
            self._buffer[-1], self._late = Tokens.joined(self._late), []

    def _on_deadline(self, timeout_s: float) -> None:
        came = f"{len(self.token_ids)} tokens had come" if self.token_ids else "no token had come"
        if self.accepted is None:
            came = "no coordinator had accepted it"
        message = f"no end within the request's {timeout_s:g} s: {came}"
        self._give_up(errors.make(code_pb2.DEADLINE_EXCEEDED, message))

    def _on_resume_timeout(self, timeout_s: float) -> None:
        assert self._cause is not None
        self._give_up(not_resumed(self._cause, timeout_s))

    def _stop_resume_timer(self) -> None:
        if self._resume_by is not None:
            self._resume_by.cancel()
            self._resume_by = None

    def _give_up(self, error: RemoteError) -> None:
        """Ends the request from this side: the coordinator is told, then it is over here."""
        on_cancel = self.on_cancel
        self._end(error)
        if on_cancel is not None:
            on_cancel(self)

    def _end(self, error: RemoteError | None) -> None:
        self.ended, self._error, self.on_cancel = True, error, None
        self._stop_resume_timer()
        if self._deadline is not None:
            self._deadline.cancel()
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
