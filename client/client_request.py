"""One request of a client across its sessions: its phase, and the data for a resume."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum

from google.rpc import code_pb2

from baton.client import errors, events
from baton.client.event_buffer import EventBuffer
from baton.client.events import Event, Finished, Tokens
from baton.client.retry_policy import MAX_LOSSES_WITHOUT_PROGRESS, resume_failed
from baton.runtime.errors import RemoteError
from baton.v1 import common_pb2, inference_pb2

_MIN_TIMEOUT_S = 1e-3


class RequestPhase(Enum):
    """Phases of a request in the client."""

    # No coordinator has accepted the request.
    NEW = "new"
    # A coordinator has accepted the request and runs it.
    RUNNING = "running"
    # The request has lost its session, or a restarting coordinator refused it. A coordinator must
    # accept it within the resume timeout.
    LOST = "lost"
    ENDED = "ended"


_P = RequestPhase
TRANSITIONS: dict[RequestPhase, frozenset[RequestPhase]] = {
    _P.NEW: frozenset({_P.RUNNING, _P.LOST, _P.ENDED}),
    _P.RUNNING: frozenset({_P.LOST, _P.ENDED}),
    # To NEW: no coordinator has ever accepted the request, and a refusal says when to submit it
    # again.
    _P.LOST: frozenset({_P.RUNNING, _P.NEW, _P.ENDED}),
    _P.ENDED: frozenset(),
}
_ENDED = RequestPhase.ENDED


class ClientRequest:
    """Checks the order of deltas, buffers events for the reader, and keeps the data for a resume.

    The session manager or one of its sessions holds the request until the request ends.

    Args:
        request: The request as it is first submitted.
        max_buffered_events: Limit of buffered events.
        timeout_s: Deadline of the request; None: no deadline.
        retry_timeout_s: Time in which a refused request is submitted again; 0: never.
        credential: Returns a fresh `authorization` for each resubmission, because the first one
            may have expired. None: the request keeps its credential.

    Attributes:
        phase: Phase of the request; see TRANSITIONS.
        buffer: Events that wait for the reader.
        on_cancel: Called when the request is cancelled or has ended here; the current holder sets
            it.
        address: Coordinator that runs the request, or ran it when it ended; None: no coordinator.
        accepted: The first Accepted event; None before it.
        num_resumes: Number of times that the request was accepted again.
        num_refusals: Number of consecutive refusals after which the request is submitted again.
        cancel_requested: The reader has cancelled the request.
        token_ids: All output tokens received so far.
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
        self._has_logprobs = request.sampling.HasField("logprobs")
        self.phase = RequestPhase.NEW
        self.buffer = EventBuffer(max_buffered_events)
        self.on_cancel: Callable[[ClientRequest], None] | None = None
        self.address: str | None = None
        self._submitted_to = ""
        self.accepted: events.Accepted | None = None
        self.num_resumes = 0
        self.num_refusals = 0
        self.cancel_requested = False
        self.token_ids: list[int] = []
        self._num_text_chars = 0
        self._revision = ""
        self._num_losses_without_progress = 0
        self._last_error: RemoteError | None = None
        self._loop = asyncio.get_running_loop()
        self._retry_by = self._loop.time() + retry_timeout_s if retry_timeout_s else None
        self._was_refused = False
        self._resume_by: asyncio.TimerHandle | None = None
        self._deadline = (
            self._loop.call_later(timeout_s, self._on_deadline, timeout_s)
            if timeout_s is not None
            else None
        )

    @property
    def request_id(self) -> str:
        """The submitted ID, or the ID that the coordinator assigned; empty before that."""
        return self.accepted.request_id if self.accepted else self._request.request_id

    @property
    def model(self) -> str:
        """The submitted model, or the coordinator's model name once accepted; empty: base model."""
        return self.accepted.model if self.accepted else self._request.model

    @property
    def is_lost(self) -> bool:
        """Whether the request waits to be accepted again after the loss of its session."""
        return self.phase is RequestPhase.LOST

    @property
    def ended(self) -> bool:
        """Whether no further event will arrive."""
        return self.phase is _ENDED

    @property
    def remaining_resume_s(self) -> float:
        """Remaining time in which the request must be accepted again."""
        return self._resume_by.when() - self._loop.time() if self._resume_by is not None else 0.0

    @property
    def may_retry(self) -> bool:
        """Whether to submit the request again after a refusal; accepted requests resume instead."""
        return self._retry_by is not None and self.accepted is None

    @property
    def remaining_retry_s(self) -> float:
        """Remaining time in which a refused request is submitted again."""
        if self._retry_by is None:
            return 0.0
        deadline = self._deadline.when() if self._deadline is not None else self._retry_by
        return min(self._retry_by, deadline) - self._loop.time()

    def message(self) -> inference_pb2.GenerateRequest:
        """Builds the message to send now, with the received tokens and the remaining timeout."""
        if not self.is_lost and not self._was_refused:
            return self._request
        if self._credential is not None:
            # If this fails, the previous credential may still be valid.
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
            remaining_s = max(_MIN_TIMEOUT_S, self._deadline.when() - self._loop.time())
            message.timeout.FromMicroseconds(round(remaining_s * 1e6))
        return message

    def on_submitted(self, address: str, on_cancel: Callable[[ClientRequest], None]) -> None:
        """A session with the coordinator at this address holds the request now."""
        self._submitted_to, self.on_cancel = address, on_cancel

    def on_event(self, event: inference_pb2.SessionEvent) -> None:
        """Handles an event; the last event ends the request."""
        if self.ended:
            return
        match event.WhichOneof("event"):
            case "delta":
                self.on_delta(event.delta, event.delta.token_ids[:])
            case "accepted":
                self._on_accepted(events.accepted(event.accepted))
            case "finished":
                self.buffer.put(events.finished(event.finished))
                self._end(None)
            case "failed":
                self._end(errors.from_message(event.failed))

    def on_delta(self, delta: common_pb2.TokenDelta, token_ids: list[int]) -> None:
        """Handles the delta of an event. It runs once per delta, so it must be cheap."""
        if self.phase is _ENDED:
            return
        known, offset = self.token_ids, delta.offset
        num_known = len(known) - offset
        if num_known:
            if not self._has_new_tokens(delta, num_known):
                return
            token_ids, offset = token_ids[num_known:], len(known)
        text = delta.text
        logprobs = events.logprobs(delta.logprobs[num_known:]) if self._has_logprobs else ()
        self.buffer.put(Tokens(tuple(token_ids), text, offset, logprobs))
        known += token_ids
        self._num_text_chars += len(text)
        self._num_losses_without_progress = 0
        self._revision = delta.revision or self._revision

    def on_session_lost(
        self, error: RemoteError, resume_timeout_s: float, *, counts: bool = True
    ) -> None:
        """Handles the loss of the session: the request waits to be resumed, or fails.

        Args:
            error: Error with which the session ended.
            resume_timeout_s: Time in which the request must be accepted again; 0: it fails.
            counts: Whether the loss counts towards MAX_LOSSES_WITHOUT_PROGRESS even if the request
                was accepted before: the request may have caused the loss.
        """
        if self.ended:
            return
        self.on_cancel = None
        self._last_error = error
        self._num_losses_without_progress += counts or self.accepted is None
        if self.cancel_requested:
            self.finish_cancelled()
        elif not resume_timeout_s:
            self._end(error)
        elif self._num_losses_without_progress > MAX_LOSSES_WITHOUT_PROGRESS:
            times = f"{self._num_losses_without_progress} sessions without a new token"
            self._end(errors.make(error.code, f"the request lost {times}, the last one: {error}"))
        elif not self.is_lost:
            self._advance(RequestPhase.LOST)
            self.address, self.num_refusals = None, 0
            self._resume_by = self._loop.call_later(
                resume_timeout_s, self._on_resume_timeout, resume_timeout_s
            )

    def on_refused(self, error: RemoteError) -> None:
        """Handles a refusal after which the request will be submitted again."""
        self.num_refusals += 1
        self._was_refused = True
        self.on_no_session(error)

    def on_no_session(self, error: RemoteError) -> None:
        """Records why the request is not resumed yet, for the error of a later timeout."""
        self._last_error = error

    def start_over(self) -> None:
        """Makes a request that lost its session before it was accepted a new one again."""
        self._advance(RequestPhase.NEW)
        self.num_refusals = 0
        self._stop_resume_timer()

    def fail(self, error: RemoteError) -> None:
        """Ends the request with an error, after what is buffered."""
        if not self.ended:
            self._end(error)

    def cancel(self) -> None:
        """Asks the coordinator to cancel; the stream ends with Finished("cancelled")."""
        if not self.ended and self.on_cancel is not None:
            self.cancel_requested = True
            self.on_cancel(self)

    def finish_cancelled(self) -> None:
        """Ends the request as cancelled, without a coordinator."""
        if self.ended:
            return
        num_prompt_tokens = self.accepted.prompt_tokens if self.accepted else 0
        usage = events.Usage(num_prompt_tokens, len(self.token_ids), 0)
        budget = events.budget(common_pb2.LatencyBudget())
        self.buffer.put(Finished("cancelled", "", usage, budget))
        self._end(None)

    def abandon(self) -> None:
        """Cancels the request because its reader has left; drops the buffer."""
        if not self.ended:
            self._abort(errors.make(code_pb2.CANCELLED, "the stream was closed by its reader"))
        self.buffer.clear()

    async def next(self) -> Event | None:
        """Returns the next event; None after the last one. Allows one reader at a time.

        If the reading task is cancelled, the request is cancelled too.

        Raises:
            RemoteError: The request failed.
        """
        buffer = self.buffer
        while not buffer:
            if (arrival := buffer.arrival()) is None:
                return None
            try:
                await arrival
            except asyncio.CancelledError:
                self.abandon()
                raise
        return buffer.take()

    async def read(self, reader: object = None) -> list[Event]:
        """Returns all buffered events, waiting for at least one; empty after the last one.

        If the reading task is cancelled, the request is cancelled too.

        Args:
            reader: Object that the call keeps alive while it waits.

        Raises:
            RemoteError: The request failed.
        """
        buffer = self.buffer
        while not buffer:
            if (arrival := buffer.arrival()) is None:
                return []
            try:
                await arrival
            except asyncio.CancelledError:
                self.abandon()
                raise
        return buffer.take_all()

    def _advance(self, phase: RequestPhase) -> None:
        """Moves to another phase. Raises ValueError if the table has no such move."""
        if phase not in TRANSITIONS[self.phase]:
            name, now = self.request_id, self.phase.name
            raise ValueError(f"request {name!r}: no move from {now} to {phase.name}")
        self.phase = phase

    def _on_accepted(self, accepted: events.Accepted) -> None:
        first = self.accepted
        if first is None:
            self.accepted = accepted
            self.buffer.put(accepted)
        elif (accepted.model, accepted.prompt_tokens) != (first.model, first.prompt_tokens):
            now = f"{accepted.prompt_tokens} prompt tokens for model {accepted.model!r}"
            then = f"{first.prompt_tokens} for {first.model!r}"
            message = f"this coordinator would continue another request: {now}, not {then}"
            cause = errors.make(code_pb2.FAILED_PRECONDITION, message)
            return self._abort(resume_failed(cause))
        if self.phase is not RequestPhase.RUNNING:
            self.num_resumes += self.is_lost
            self._stop_resume_timer()
            self._advance(RequestPhase.RUNNING)
            self.address = self._submitted_to
        return None

    def _has_new_tokens(self, delta: common_pb2.TokenDelta, num_known: int) -> bool:
        """Checks a delta that does not begin after the last token received."""
        if num_known < 0:
            self._abort(
                errors.make(
                    code_pb2.DATA_LOSS,
                    f"tokens {len(self.token_ids)} to {delta.offset - 1} of the output are missing",
                )
            )
            return False
        if num_known >= len(delta.token_ids):
            return False
        if delta.text:
            self._abort(
                errors.make(
                    code_pb2.DATA_LOSS,
                    f"tokens from {delta.offset} were repeated with new tokens: the text "
                    "of the new tokens is unknown",
                )
            )
            return False
        return True

    def _on_deadline(self, timeout_s: float) -> None:
        progress = (
            f"{len(self.token_ids)} tokens received" if self.token_ids else "no token received"
        )
        if self.accepted is None:
            progress = "no coordinator had accepted it"
        message = f"the request did not end within its timeout of {timeout_s:g} s: {progress}"
        self._abort(errors.make(code_pb2.DEADLINE_EXCEEDED, message))

    def _on_resume_timeout(self, timeout_s: float) -> None:
        assert self._last_error is not None
        self._abort(resume_failed(self._last_error, timeout_s))

    def _stop_resume_timer(self) -> None:
        if self._resume_by is not None:
            self._resume_by.cancel()
            self._resume_by = None

    def _abort(self, error: RemoteError) -> None:
        """Ends the request with an error and tells its holder, which cancels it remotely."""
        on_cancel = self.on_cancel
        self._end(error)
        if on_cancel is not None:
            on_cancel(self)

    def _end(self, error: RemoteError | None) -> None:
        self._advance(_ENDED)
        self.on_cancel = None
        self._stop_resume_timer()
        if self._deadline is not None:
            self._deadline.cancel()
        self.buffer.end(error)
