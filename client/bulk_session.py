"""A second session with a coordinator, for requests that take long to send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from google.rpc import code_pb2

from baton.client import errors
from baton.client.request_state import RequestState
from baton.client.session import Session, SessionEnd
from baton.runtime.errors import RemoteError


class BulkSession:
    """Session for large requests, on a connection of its own with a long ping timeout.

    A large request on a slow connection delays the answers to pings by the time that it takes to
    send. The coordinator is supervised by the main session, which has a short ping timeout: the
    connector closes the bulk session when the main session ends.

    Args:
        open_channel: Opens the channel.
        address: Address of the coordinator.
        on_refused: Like that of Session.
        on_end: Called when the session has ended by itself, with its unended requests.
    """

    def __init__(
        self,
        open_channel: Callable[[], grpc.aio.Channel],
        address: str,
        *,
        on_refused: Callable[[RequestState, RemoteError], None],
        on_end: Callable[[list[RequestState], SessionEnd], None],
    ) -> None:
        self._open_channel, self._address = open_channel, address
        self._on_refused, self._on_end = on_refused, on_end
        self._session: Session | None = None
        self._waiting: dict[RequestState, None] = {}
        self.closed = False
        self._task = asyncio.create_task(self._run(), name="baton client bulk session")

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        in_session = self._session.num_requests if self._session is not None else 0
        return len(self._waiting) + in_session

    def submit(self, state: RequestState) -> None:
        """Submits a request, or queues it until the connection is open."""
        if self._session is not None:
            self._session.submit(state)
        else:
            state.on_cancel = self._cancel_waiting
            self._waiting[state] = None

    async def aclose(self) -> list[RequestState]:
        """Ends the session; returns the requests that have not ended."""
        self.closed = True
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return self._release()

    def _cancel_waiting(self, state: RequestState) -> None:
        self._waiting.pop(state, None)
        state.finish_cancelled()

    async def _run(self) -> None:
        async with self._open_channel() as channel:
            session = Session(
                channel, self._address, on_open=self._opened, on_refused=self._on_refused
            )
            try:
                end = await session.run()
            except Exception as error:
                why = errors.make(code_pb2.INTERNAL, f"internal error in the client: {error!r}")
                end = SessionEnd(why, served=True, refused=False)
        self.closed = True
        self._on_end(self._release(), end)

    def _opened(self, session: Session) -> None:
        self._session = session
        waiting, self._waiting = self._waiting, {}
        for state in waiting:
            session.submit(state)

    def _release(self) -> list[RequestState]:
        waiting, self._waiting = list(self._waiting), {}
        session, self._session = self._session, None
        return [*waiting, *(session.release() if session is not None else [])]
