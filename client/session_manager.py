"""Opens sessions with coordinators and keeps the requests that wait for one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from google.rpc import code_pb2

from baton.client import errors
from baton.client.client_request import ClientRequest, RequestPhase
from baton.client.retry_policy import (
    backoff_s,
    new_request_retry_delay_s,
    resume_failed,
    resume_retry_delay_s,
)
from baton.client.session import Session, SessionEnd, check_size
from baton.runtime.errors import RemoteError, ResourceExhausted
from baton.runtime.network import rpc
from baton.runtime.security.dial import PLAIN, Dial

# A coordinator that hangs is detected after at most the sum of both.
_PING_INTERVAL_S, _PING_TIMEOUT_S = 3.0, 3.0
# A request without a session waits this long before it moves to another cell. A coordinator usually
# restarts faster, and its own workers still have the request's KV cache.
MOVES_AFTER_S = 5.0
# Without resuming: time in which a request must be accepted if its session ended because of other
# callers' credentials.
_RESUBMIT_TIMEOUT_S = 10.0


class SessionManager:
    """Keeps one session at a time, with the first coordinator that can be reached.

    A BatonClient owns the manager. A session opens when a request waits. After the loss of a
    session, its requests wait for the next one; the addresses are tried in turn, with a backoff
    after each round. A coordinator that is restarting keeps its running requests, and new requests
    go to another coordinator.

    Each unended request is in exactly one place, which sets the request's `on_cancel`: in a session
    (`Session`), in the queue for the next session (`_waiting`), or in a retry delay (`_delayed`). A
    lost request may also have a timer after which it looks for another cell (`_move_timers`).

    Args:
        addresses: Addresses of the coordinators, host:port; at least one.
        max_requests: Limit of concurrent requests.
        resume_timeout_s: Time in which a request that lost its session must be accepted again; 0:
            it fails instead.
        dial: Connection settings; each session reads the TLS files again.
        find_other_sessions: Returns the manager of another cell for a request that has been
            without a session for MOVES_AFTER_S, that lost its session before its first token, or
            that a restarting coordinator refused. None: such requests wait here.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        max_requests: int,
        resume_timeout_s: float,
        dial: Dial = PLAIN,
        find_other_sessions: Callable[[ClientRequest], SessionManager | None] | None = None,
    ) -> None:
        self._addresses, self._dial = tuple(addresses), dial
        self._max_requests, self._resume_timeout_s = max_requests, resume_timeout_s
        self._next_address = 0
        self._session: Session | None = None
        self._waiting: dict[ClientRequest, None] = {}
        self._delayed: dict[ClientRequest, asyncio.TimerHandle] = {}
        self._find_other_sessions = find_other_sessions
        # Timers after which requests without a session look for another cell.
        self._move_timers: dict[ClientRequest, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        # Sessions with restarting coordinators: at most one for each address but the current one.
        self._draining: dict[Session, asyncio.Task[None]] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        sessions = [*self._draining, *([self._session] if self._session is not None else [])]
        in_sessions = sum(session.num_requests for session in sessions)
        return in_sessions + len(self._waiting) + len(self._delayed)

    @property
    def is_full(self) -> bool:
        """Whether max_requests requests have not ended."""
        return self.num_requests >= self._max_requests

    @property
    def address(self) -> str | None:
        """Address of the coordinator of the current session; None without a session."""
        return self._session.address if self._session is not None else None

    @property
    def draining(self) -> bool:
        """Whether the coordinator of the current session is restarting: it takes no requests."""
        return self._session is not None and self._session.draining

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses, in the order in which they are tried next."""
        return self._addresses[self._next_address :] + self._addresses[: self._next_address]

    def prefer(self, address: str) -> None:
        """Makes the next session try this address first."""
        self._next_address = self._addresses.index(address)

    def submit(self, request: ClientRequest) -> None:
        """Submits a new request.

        Raises:
            ResourceExhaustedError: max_requests requests are running on this client.
            InvalidArgumentError: The request exceeds gRPC's message size limit.
        """
        if self.is_full:
            message = f"this client has {self._max_requests} requests running, its limit"
            raise errors.from_baton(
                ResourceExhausted(message, reason="CLIENT_REQUESTS", retry_after_s=None)
            )
        check_size(request.message())
        self._place(request)

    def take_over(self, request: ClientRequest, moves_after_s: float) -> None:
        """Takes over a request from an ended session or from another cell's client.

        Args:
            request: The request.
            moves_after_s: Seconds after which the request looks for another cell, if it is lost.
        """
        self._place(request)
        self._schedule_move(request, moves_after_s)

    async def aclose(self, why: str) -> None:
        """Ends the sessions and all requests with the reason `why`; waits for the tasks."""
        task, self._task = self._task, None
        # A timer that fires later would open a session that is never closed.
        for timer in (*self._delayed.values(), *self._move_timers.values()):
            timer.cancel()
        self._move_timers.clear()
        tasks = [*self._draining.values(), *([task] if task is not None else [])]
        for one in tasks:
            one.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            # Readers of the requests must not wait forever, even if this call is cancelled.
            self._fail_all(errors.make(code_pb2.CANCELLED, why))

    def _place(self, request: ClientRequest) -> None:
        """Submits a request to the current session, or queues it for the next one."""
        if self._session is not None and not self._session.closed:
            self._session.submit(request)
            return
        self._queue(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="baton client sessions")

    def _queue(self, request: ClientRequest) -> None:
        request.on_cancel = self._cancel_waiting
        self._waiting[request] = None

    def _cancel_waiting(self, request: ClientRequest) -> None:
        """Cancels a request that waits here, without a coordinator."""
        self._drop(request)
        request.finish_cancelled()

    def _drop(self, request: ClientRequest) -> None:
        """Removes a request from the queue and from its retry delay."""
        self._waiting.pop(request, None)
        timer = self._delayed.pop(request, None)
        if timer is not None:
            timer.cancel()

    def _fail_all(self, error: RemoteError) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        remaining = [*self._waiting, *self._delayed]
        self._waiting, self._delayed = {}, {}
        for request in remaining:
            request.fail(error)

    async def _run(self) -> None:
        """Opens sessions while requests wait for one and this is the current task."""
        try:
            num_failures = 0
            while self._waiting and self._task is asyncio.current_task():
                served = await self._try_addresses()
                num_failures = 0 if served else num_failures + 1
                if self._waiting and self._task is asyncio.current_task():
                    await asyncio.sleep(backoff_s(max(0, num_failures - 1), random.random()))
        except Exception as error:
            self._fail_all(
                errors.make(code_pb2.INTERNAL, f"internal error in the client: {error!r}")
            )
            raise

    async def _try_addresses(self) -> bool:
        """Tries each address once; returns True after the end of a session that served."""
        began_with = list(self._waiting)
        ends: list[SessionEnd] = []
        remaining = {session.address for session in self._draining}
        for address in self.addresses:
            if address in remaining:
                continue
            end = await self._serve(address)
            if end.served:
                return True
            ends.append(end)
            if not self._waiting:
                return False
        error = errors.combine([end.error for end in ends])
        permanent = all(end.permanent for end in ends)
        for request in began_with:
            if request in self._waiting and not request.is_lost:
                del self._waiting[request]
                self._on_refused(request, error)
            elif request in self._waiting and permanent:
                del self._waiting[request]
                request.fail(resume_failed(error))
            else:
                request.on_no_session(error)
        return False

    async def _serve(self, address: str) -> SessionEnd:
        """Runs one session, from the connection attempt to its end."""
        self.prefer(address)
        async with rpc.channel(
            address,
            ping_interval_s=_PING_INTERVAL_S,
            ping_timeout_s=_PING_TIMEOUT_S,
            dial=self._dial,
        ) as channel:
            session = Session(channel, address, on_open=self._opened, on_refused=self._on_refused)
            end: SessionEnd | None = None
            try:
                end = await session.run()
            finally:
                if self._draining.pop(session, None) is None:
                    self._session = None
                    self._skip_address(address)
                for request in session.release():
                    self._take_back(request, end)
        return end

    def _skip_address(self, address: str) -> None:
        """Moves on to the next address, unless this address is no longer the first to try."""
        if self._addresses[self._next_address] == address:
            self._next_address = (self._next_address + 1) % len(self._addresses)

    def _opened(self, session: Session) -> None:
        self._session = session
        waiting, self._waiting = self._waiting, {}
        for request in waiting:
            session.submit(request)

    def _take_back(self, request: ClientRequest, end: SessionEnd | None) -> None:
        """Takes a request back from an ended session; `end` is None if the client is closing."""
        if end is None:
            self._queue(request)
            return
        is_of_others = _is_of_others(request, end.error)
        if end.permanent and end.served and not is_of_others:
            request.fail(end.error)
        elif end.served or not end.refused:
            # A session that never served may have ended at a proxy: the request did not cause that.
            timeout_s = self._resume_timeout_s
            if not timeout_s and is_of_others:
                timeout_s = _RESUBMIT_TIMEOUT_S
            request.on_session_lost(end.error, timeout_s, counts=end.served)
        if not request.ended:
            self.take_over(request, _moves_after_s(request))

    def _schedule_move(self, request: ClientRequest, delay_s: float) -> None:
        """Lets a lost request look for another cell after `delay_s` seconds."""
        if (
            request.is_lost
            and self._find_other_sessions is not None
            and request not in self._move_timers
        ):
            self._start_move_timer(request, delay_s)

    def _start_move_timer(self, request: ClientRequest, delay_s: float) -> None:
        self._move_timers[request] = asyncio.get_running_loop().call_later(
            delay_s, self._move, request
        )

    def _move(self, request: ClientRequest) -> None:
        """Moves a waiting request to another cell's client, or tries again later."""
        del self._move_timers[request]
        if not request.is_lost or request.cancel_requested:
            return
        assert self._find_other_sessions is not None
        other = None
        if request in self._waiting or request in self._delayed:
            other = self._find_other_sessions(request)
        if other is None or other.is_full:
            self._start_move_timer(request, MOVES_AFTER_S)
            return
        self._drop(request)
        other.take_over(request, MOVES_AFTER_S)

    def _detach_draining_session(self) -> bool:
        """Detaches a draining session; returns False if there is no other address to use."""
        session, task = self._session, self._task
        if session is None or not session.draining or task is None:
            return False
        remaining = {one.address for one in self._draining} | {session.address}
        if remaining >= set(self._addresses):
            return False
        self._draining[session] = task
        self._session = self._task = None
        self._skip_address(session.address)
        return True

    def _on_refused(self, request: ClientRequest, error: RemoteError) -> None:
        """Handles a refusal: the request is submitted again, now or later, or it ends."""
        if request.cancel_requested:
            request.finish_cancelled()
            return
        if errors.is_restarting(error) and not request.is_lost:
            # The coordinator is restarting: the request waits for the next session.
            request.on_session_lost(error, self._resume_timeout_s)
            if request.ended:
                return
        if self._detach_draining_session():
            # The other coordinators of the cell come first, if they can be reached.
            self.take_over(request, MOVES_AFTER_S)
            return
        if _may_start_over(request, error):
            request.start_over()
        delay_s = _retry_delay_s(request, error)
        if delay_s is None:
            # If the request was never accepted, its caller may submit it again.
            request.fail(resume_failed(error) if request.accepted else error)
        else:
            request.on_refused(error)
            self._delay(request, delay_s)

    def _delay(self, request: ClientRequest, delay_s: float) -> None:
        """Submits a refused request again after a delay."""
        request.on_cancel = self._cancel_waiting
        self._delayed[request] = asyncio.get_running_loop().call_later(
            delay_s, self._submit_delayed, request
        )
        self._schedule_move(request, _moves_after_s(request))

    def _submit_delayed(self, request: ClientRequest) -> None:
        del self._delayed[request]
        self._place(request)


def _moves_after_s(request: ClientRequest) -> float:
    """Time after which a lost request looks for another cell.

    A request without tokens loses nothing by moving at once.
    """
    return MOVES_AFTER_S if request.token_ids else 0.0


def _may_start_over(request: ClientRequest, error: RemoteError) -> bool:
    """Whether a lost and refused request is submitted as a new one: this may wait longer.

    No coordinator runs the request, and the refusal says when to submit it again.
    """
    return (
        request.is_lost
        and request.may_retry
        and error.retry_after_s is not None
        and request.remaining_retry_s > request.remaining_resume_s
    )


def _retry_delay_s(request: ClientRequest, error: RemoteError) -> float | None:
    """Returns the delay before a refused request is submitted again; None: never."""
    if request.is_lost:
        delay_s = resume_retry_delay_s(error, request.num_refusals, random.random())
        remaining_s = request.remaining_resume_s
    else:
        delay_s = new_request_retry_delay_s(error, random.random())
        remaining_s = request.remaining_retry_s
    return delay_s if delay_s is not None and delay_s < remaining_s else None


def _is_of_others(request: ClientRequest, error: RemoteError) -> bool:
    """Whether a session's error is about the credentials of other requests than this one.

    A coordinator ends a session in which no credential was valid for a while. It has refused all
    requests that it has read, so it has not read the unanswered ones.
    """
    is_unanswered = request.phase is not RequestPhase.RUNNING
    return is_unanswered and error.code == code_pb2.UNAUTHENTICATED
