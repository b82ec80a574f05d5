"""Which requests there are, by every name they have, and which there were."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from baton.coordinator.request import EndedRequest, Request, StreamKey


class Register:
    """Finds requests that have not ended, and the latest of those that have.

    Args:
        max_ended: how many of those are remembered.
    """

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._requests: dict[str, Request] = {}
        # Dispatched ones, by what their workers call them; a handle is never used again.
        self._by_handle: dict[int, Request] = {}
        self._num_handles = 0
        self._by_session: dict[int, dict[int, Request]] = {}
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def by_stream(self, to: StreamKey) -> Request | None:
        return self._by_session.get(to.session, {}).get(to.stream)

    def of_session(self, session: int) -> list[Request]:
        return list(self._by_session.get(session, {}).values())

    def all(self) -> list[Request]:
        return list(self._requests.values())

    @property
    def by_handle(self) -> Mapping[int, Request]:
        """Those whose attempt goes on, by what their workers call it."""
        return self._by_handle

    @property
    def ended(self) -> Mapping[str, EndedRequest]:
        """By their ids, oldest first."""
        return self._ended

    def add(self, request: Request) -> None:
        to = request.submission.to
        self._requests[request.id] = request
        self._by_session.setdefault(to.session, {})[to.stream] = request

    def remove(self, request: Request) -> None:
        """It has ended, and no attempt of it goes on."""
        to = request.submission.to
        del self._requests[request.id]
        session = self._by_session[to.session]
        del session[to.stream]
        if not session:
            del self._by_session[to.session]

    def remember(self, request: Request, record: EndedRequest) -> None:
        """A request was removed."""
        self._ended.pop(request.id, None)
        self._ended[request.id] = record
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def begin_attempt(self, request: Request) -> None:
        """Gives its attempt a handle."""
        self._num_handles += 1
        request.handle = self._num_handles
        self._by_handle[request.handle] = request

    def end_attempt(self, request: Request) -> None:
        """Takes its handle back; idempotent."""
        self._by_handle.pop(request.handle, None)
