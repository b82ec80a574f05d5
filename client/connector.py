"""Which coordinator the requests are with, and where they wait while there is none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from google.rpc import code_pb2

from baton.client import errors
from baton.client.request_state import RequestState
from baton.client.resume import backoff_s, later_s, not_resumed, retry_delay_s
from baton.client.session import Session, SessionEnd, check_size
from baton.runtime import rpc
from baton.runtime.dial import PLAIN, Dial
from baton.runtime.errors import RemoteError, ResourceExhausted

# A coordinator that hangs is given up after their sum at most; a reader waits for that long.
_PING_INTERVAL_S, _PING_TIMEOUT_S = 3.0, 3.0
# Longer than a coordinator takes to start again, when its workers still have what it lost.
MOVES_AFTER_S = 5.0


class Connector:
    """One session at a time, with the first coordinator that can be reached.

    Every request that has not ended is in one place: with the session, waiting for one, or waiting
    until it may be submitted again. A session opens when a request waits. When it is lost, its
    requests wait for the next one; addresses are tried in turn, with a pause after each round.
    A coordinator that says that it stops keeps what it has, and what is new goes to another one.

    Args:
        addresses: of coordinators, host:port; at least one.
        max_requests: live at a time.
        resume_timeout_s: in which a request that lost its session must be accepted again; 0: it
            fails instead.
        dial: how; each session reads the files again.
        elsewhere: says which other connector may go on with a request that has been without a
            session for MOVES_AFTER_S, or has lost its session and no token has come of; None: such
            a request waits here.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        max_requests: int,
        resume_timeout_s: float,
        dial: Dial = PLAIN,
        elsewhere: Callable[[RequestState], Connector | None] | None = None,
    ) -> None:
        self._addresses, self._dial = tuple(addresses), dial
        self._max_requests, self._resume_timeout_s = max_requests, resume_timeout_s
        self._next_address = 0
        self._session: Session | None = None
        self._waiting: dict[RequestState, None] = {}
        self._delayed: dict[RequestState, asyncio.TimerHandle] = {}
        self._elsewhere = elsewhere
        # Of requests that lost their session: when to look for another place.
        self._moving: dict[RequestState, asyncio.TimerHandle] = {}
        self._task: asyncio.Task[None] | None = None
        # With coordinators that stop: at most one for each address but the current one's.
        self._leaving: dict[Session, asyncio.Task[None]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        sessions = [*self._leaving, *([self._session] if self._session is not None else [])]
        in_sessions = sum(session.num_requests for session in sessions)
        return in_sessions + len(self._waiting) + len(self._delayed)

    @property
    def address(self) -> str | None:
        """The coordinator that the session is with; None while there is none."""
        return self._session.address if self._session is not None else None

    @property
    def addresses(self) -> tuple[str, ...]:
        """In the order in which they are tried next."""
        return self._addresses[self._next_address :] + self._addresses[: self._next_address]

    def prefer(self, address: str) -> None:
        """Tries this one first when the next session opens."""
        self._next_address = self._addresses.index(address)

    def submit(self, state: RequestState) -> None:
        """Takes a new request.

        Raises:
            ResourceExhaustedError: too many live requests on this client.
            InvalidArgumentError: larger than one message may be.
        """
        if self.num_requests >= self._max_requests:
            message = f"this client has {self._max_requests} requests running, its limit"
            raise errors.from_baton(
                ResourceExhausted(message, reason="CLIENT_REQUESTS", retry_after_s=None)
            )
        check_size(state.message())
        self._place(state)

    async def aclose(self, why: str) -> None:
        """Ends the session and every request, which say why; returns when the tasks are gone."""
        task, self._task = self._task, None
        # Or one of these would open a session that nobody ends.
        for timer in (*self._delayed.values(), *self._moving.values()):
            timer.cancel()
        self._moving.clear()
        tasks = [*self._leaving.values(), *([task] if task is not None else [])]
        for one in tasks:
            one.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            # Also when nobody waits for it any more: others may read what it held.
            self._fail_all(errors.make(code_pb2.CANCELLED, why))

    def _place(self, state: RequestState) -> None:
        """Submits a request, now or when there is a session."""
        if self._session is not None and not self._session.closed:
            self._session.submit(state)
            return
        self._wait(state)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="baton client sessions")

    def _wait(self, state: RequestState) -> None:
        state.on_cancel = self._forget
        self._waiting[state] = None

    def _forget(self, state: RequestState) -> None:
        """Of a request that no coordinator has."""
        self._drop(state)
        state.finish_cancelled()

    def _drop(self, state: RequestState) -> None:
        """The request waits here no longer."""
        self._waiting.pop(state, None)
        timer = self._delayed.pop(state, None)
        if timer is not None:
            timer.cancel()

    def _fail_all(self, error: RemoteError) -> None:
        for timer in self._delayed.values():
            timer.cancel()
        left = [*self._waiting, *self._delayed]
        self._waiting, self._delayed = {}, {}
        for state in left:
            state.fail(error)

    async def _run(self) -> None:
        """Opens sessions for as long as requests wait for one, and it is this task's to do."""
        try:
            num_failures = 0
            while self._waiting and self._task is asyncio.current_task():
                served = await self._round()
                num_failures = 0 if served else num_failures + 1
                if self._waiting and self._task is asyncio.current_task():
                    await asyncio.sleep(backoff_s(max(0, num_failures - 1), random.random()))
        except Exception as error:
            self._fail_all(errors.make(code_pb2.INTERNAL, f"the client failed: {error!r}"))
            raise

    async def _round(self) -> bool:
        """Tries each address once, until a session that was of use has ended."""
        began_with = list(self._waiting)
        ends: list[SessionEnd] = []
        left = {session.address for session in self._leaving}
        for address in self.addresses:
            if address in left:
                continue
            end = await self._serve(address)
            if end.served:
                return True
            ends.append(end)
            if not self._waiting:
                return False
        error = errors.of_all([end.error for end in ends])
        hopeless = all(end.hopeless for end in ends)
        for state in began_with:
            if state in self._waiting and not state.resuming:
                del self._waiting[state]
                self._not_accepted(state, error)
            elif state in self._waiting and hopeless:
                del self._waiting[state]
                state.fail(not_resumed(error))
            else:
                state.delay_resume(error)
        return False

    async def _serve(self, address: str) -> SessionEnd:
        """One session, from the attempt to connect to its end."""
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
                if self._leaving.pop(session, None) is None:
                    self._session = None
                    self._pass_on(address)
                for state in session.release():
                    self._take_back(state, end)
        return end

    def _pass_on(self, address: str) -> None:
        """The next one is tried first, unless another one than this is to be already."""
        if self._addresses[self._next_address] == address:
            self._next_address = (self._next_address + 1) % len(self._addresses)

    def _opened(self, session: Session) -> None:
        self._session = session
        waiting, self._waiting = self._waiting, {}
        for state in waiting:
            session.submit(state)

    def _take_back(self, state: RequestState, end: SessionEnd | None) -> None:
        """Takes a request from a session that is over; end is None when the client closes."""
        if end is not None and end.hopeless and end.served:
            state.fail(end.error)
        elif end is not None and (end.served or not end.refused):
            # A session that has said nothing may have been a proxy's.
            state.lose(end.error, self._resume_timeout_s, counts=end.served)
        if end is None:
            self._wait(state)
        elif not state.ended:
            # Nobody has anything of one without a token that would be worth waiting for.
            self._go_on_with(state, MOVES_AFTER_S if state.token_ids else 0.0)

    def _move_later(self, state: RequestState, delay_s: float) -> None:
        self._moving[state] = asyncio.get_running_loop().call_later(delay_s, self._move, state)

    def _move(self, state: RequestState) -> None:
        """Gives a request that still waits to another connector, or looks for one again later."""
        del self._moving[state]
        if not state.resuming or state.ended or state.cancel_asked:
            return
        assert self._elsewhere is not None
        other = self._elsewhere(state) if state in self._waiting or state in self._delayed else None
        if other is None or other.num_requests >= other._max_requests:
            self._move_later(state, MOVES_AFTER_S)
            return
        self._drop(state)
        other._go_on_with(state, MOVES_AFTER_S)

    def _go_on_with(self, state: RequestState, moves_after_s: float) -> None:
        """Takes a request that lost its session."""
        self._place(state)
        if state.resuming and self._elsewhere is not None and state not in self._moving:
            self._move_later(state, moves_after_s)

    def _leave(self) -> bool:
        """Lets the session go on by itself, for what it has; False with nowhere else to go."""
        session, task = self._session, self._task
        if session is None or not session.leaving or task is None:
            return False
        left = {one.address for one in self._leaving} | {session.address}
        if left >= set(self._addresses):
            return False
        self._leaving[session] = task
        self._session = self._task = None
        self._pass_on(session.address)
        return True

    def _not_accepted(self, state: RequestState, error: RemoteError) -> None:
        """Submits a request again that was refused for now, or gives it up."""
        if state.cancel_asked:
            state.finish_cancelled()
            return
        if not state.resuming and errors.restarting(error):
            # The coordinator stops: the request waits for the next one.
            state.lose(error, self._resume_timeout_s)
            if state.ended:
                return
        if self._leave():
            self._place(state)
            return
        if state.resuming:
            delay_s = retry_delay_s(error, state.num_refusals, random.random())
            left_s = state.resume_left_s
        else:
            delay_s = later_s(error, random.random())
            left_s = state.retry_left_s
        if delay_s is None or delay_s >= left_s:
            # One that was never accepted is still its caller's to submit again.
            state.fail(not_resumed(error) if state.accepted else error)
        else:
            state.num_refusals += 1
            if state.resuming:
                state.delay_resume(error)
            else:
                state.retry()
            state.on_cancel = self._forget
            self._delayed[state] = asyncio.get_running_loop().call_later(
                delay_s, self._submit_delayed, state
            )

    def _submit_delayed(self, state: RequestState) -> None:
        del self._delayed[state]
        self._place(state)
