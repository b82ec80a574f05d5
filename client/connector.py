"""Opens sessions with coordinators and keeps the requests that wait for one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from google.rpc import code_pb2

from baton.client import errors
from baton.client.request_state import RequestState
from baton.client.retry_policy import (
    backoff_s,
    new_request_retry_delay_s,
    resume_failed,
    resume_retry_delay_s,
)
from baton.client.session import Session, SessionEnd, check_size
from baton.runtime import rpc
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.errors import RemoteError, ResourceExhausted

# A coordinator that hangs is detected after at most the sum of both.
_PING_INTERVAL_S, _PING_TIMEOUT_S = 3.0, 3.0
# A request without a session waits this long before it moves to another cell. A coordinator usually
# restarts faster, and its own workers still have the request's KV cache.
MOVES_AFTER_S = 5.0
# Without resuming: time in which a request must be accepted if its session ended because of other
# callers' credentials.
_RESUBMIT_TIMEOUT_S = 10.0


class Connector:
    """Keeps one session at a time, with the first coordinator that can be reached.

    A BatonClient owns the connector. Each unended request is in exactly one place: in a session, in
    the queue for the next session, or in a retry delay. A session opens when a request waits. After
    the loss of a session, its requests wait for the next one; the addresses are tried in turn, with
    a backoff after each round. A coordinator that is restarting keeps its running requests, and new
    requests go to another coordinator.

    Args:
        addresses: Addresses of the coordinators, host:port; at least one.
        max_requests: Limit of concurrent requests.
        resume_timeout_s: Time in which a request that lost its session must be accepted again; 0:
            it fails instead.
        dial: Connection settings; each session reads the TLS files again.
        find_other_connector: Returns the connector of another cell for a request that has been
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
        find_other_connector: Callable[[RequestState], Connector | None] | None = None,
    ) -> None:
        self._addresses, self._dial = tuple(addresses), dial
        self._max_requests, self._resume_timeout_s = max_requests, resume_timeout_s
        self._next_address = 0
        self._session: Session | None = None
        self._waiting: dict[RequestState, None] = {}
        self._delayed: dict[RequestState, asyncio.TimerHandle] = {}
        self._find_other_connector = find_other_connector
        # Timers after which requests without a session look for another cell.
        self._move_timers: dict[RequestState, asyncio.TimerHandle] = {}
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

    def submit(self, state: RequestState) -> None:
        """Submits a new request.

        Raises:
            ResourceExhaustedError: max_requests requests are running on this client.
            InvalidArgumentError: The request exceeds gRPC's message size limit.
        """
        if self.num_requests >= self._max_requests:
            message = f"this client has {self._max_requests} requests running, its limit"
            raise errors.from_baton(
                ResourceExhausted(message, reason="CLIENT_REQUESTS", retry_after_s=None)
            )
        check_size(state.message())
        self._place(state)

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

    def _place(self, state: RequestState) -> None:
        """Submits a request to the current session, or queues it for the next one."""
        if self._session is not None and not self._session.closed:
            self._session.submit(state)
            return
        self._queue(state)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="baton client sessions")

    def _queue(self, state: RequestState) -> None:
        state.on_cancel = self._cancel_waiting
        self._waiting[state] = None

    def _cancel_waiting(self, state: RequestState) -> None:
        """Cancels a request that waits here, without a coordinator."""
        self._drop(state)
        state.finish_cancelled()

    def _drop(self, state: RequestState) -> None:
        """Removes a request from the queue and from its retry delay."""
        self._waiting.pop(state, None)
        timer = self._delayed.pop(state, None)
        if timer is not None:
            timer.cancel()

    def _fail_all(self, error: RemoteError) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        remaining = [*self._waiting, *self._delayed]
        self._waiting, self._delayed = {}, {}
        for state in remaining:
            state.fail(error)

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
        for state in began_with:
            if state in self._waiting and not state.resuming:
                del self._waiting[state]
                self._not_accepted(state, error)
            elif state in self._waiting and permanent:
                del self._waiting[state]
                state.fail(resume_failed(error))
            else:
                state.delay_resume(error)
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
            session = Session(channel, address, on_open=self._opened, on_refused=self._not_accepted)
            end: SessionEnd | None = None
            try:
                end = await session.run()
            finally:
                if self._draining.pop(session, None) is None:
                    self._session = None
                    self._skip_address(address)
                for state in session.release():
                    self._take_back(state, end)
        return end

    def _skip_address(self, address: str) -> None:
        """Moves on to the next address, unless this address is no longer the first to try."""
        if self._addresses[self._next_address] == address:
            self._next_address = (self._next_address + 1) % len(self._addresses)

    def _opened(self, session: Session) -> None:
        self._session = session
        waiting, self._waiting = self._waiting, {}
        for state in waiting:
            session.submit(state)

    def _take_back(self, state: RequestState, end: SessionEnd | None) -> None:
        """Takes a request back from an ended session; `end` is None if the client is closing."""
        if end is not None and end.permanent and end.served and not _is_of_others(state, end.error):
            state.fail(end.error)
        elif end is not None and (end.served or not end.refused):
            # A session that never served may have ended at a proxy: the request did not cause that.
            timeout_s = self._resume_timeout_s
            if not timeout_s and _is_of_others(state, end.error):
                timeout_s = _RESUBMIT_TIMEOUT_S
            state.on_session_lost(end.error, timeout_s, counts=end.served)
        if end is None:
            self._queue(state)
        elif not state.ended:
            # A request without tokens loses nothing by moving to another cell at once.
            self._take_over(state, MOVES_AFTER_S if state.token_ids else 0.0)

    def _may_move(self, state: RequestState, delay_s: float) -> None:
        """Lets a request that lost its session look for another cell after `delay_s` seconds."""
        if (
            state.resuming
            and self._find_other_connector is not None
            and state not in self._move_timers
        ):
            self._move_later(state, delay_s)

    def _move_later(self, state: RequestState, delay_s: float) -> None:
        self._move_timers[state] = asyncio.get_running_loop().call_later(delay_s, self._move, state)

    def _move(self, state: RequestState) -> None:
        """Moves a waiting request to another cell's connector, or tries again later."""
        del self._move_timers[state]
        if not state.resuming or state.ended or state.cancel_requested:
            return
        assert self._find_other_connector is not None
        other = (
            self._find_other_connector(state)
            if state in self._waiting or state in self._delayed
            else None
        )
        if other is None or other.num_requests >= other._max_requests:
            self._move_later(state, MOVES_AFTER_S)
            return
        self._drop(state)
        other._take_over(state, MOVES_AFTER_S)

    def _take_over(self, state: RequestState, moves_after_s: float) -> None:
        """Takes over a request that lost its session."""
        self._place(state)
        self._may_move(state, moves_after_s)

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

    def _not_accepted(self, state: RequestState, error: RemoteError) -> None:
        """Handles a refusal: schedules a resubmission or fails the request."""
        if state.cancel_requested:
            state.finish_cancelled()
            return
        if not state.resuming and errors.is_restarting(error):
            # The coordinator is restarting: the request waits for the next session.
            state.on_session_lost(error, self._resume_timeout_s)
            if state.ended:
                return
        if self._detach_draining_session():
            # The other coordinators of the cell come first, if they can be reached.
            self._take_over(state, MOVES_AFTER_S)
            return
        if (
            state.resuming
            and state.may_retry
            and error.retry_after_s is not None
            and state.remaining_retry_s > state.remaining_resume_s
        ):
            # No coordinator runs the request, and the refusal says when to submit it again.
            state.start_over()
        if state.resuming:
            delay_s = resume_retry_delay_s(error, state.num_refusals, random.random())
            remaining_s = state.remaining_resume_s
        else:
            delay_s = new_request_retry_delay_s(error, random.random())
            remaining_s = state.remaining_retry_s
        if delay_s is None or delay_s >= remaining_s:
            # If the request was never accepted, its caller may submit it again.
            state.fail(resume_failed(error) if state.accepted else error)
        else:
            state.num_refusals += 1
            if state.resuming:
                state.delay_resume(error)
            else:
                state.retry()
            state.on_cancel = self._cancel_waiting
            self._delayed[state] = asyncio.get_running_loop().call_later(
                delay_s, self._submit_delayed, state
            )
            self._may_move(state, MOVES_AFTER_S if state.token_ids else 0.0)

    def _submit_delayed(self, state: RequestState) -> None:
        del self._delayed[state]
        self._place(state)


def _is_of_others(state: RequestState, error: RemoteError) -> bool:
    """Whether a session's error is about the credentials of other requests than this one.

    A coordinator ends a session in which no credential was valid for a while. It has refused all
    requests that it has read, so it has not read the unanswered ones.
    """
    is_unanswered = state.accepted is None or state.resuming
    return is_unanswered and error.code == code_pb2.UNAUTHENTICATED
