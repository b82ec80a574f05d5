"""Tables of the requests that have not ended and of the latest that have, by each of their keys."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.requests import EndedRequest, Request, RequestKey, StreamKey
from baton.runtime.errors import InvalidArgument
from baton.runtime.names import request_name

Found = TypeVar("Found", Request, Request | EndedRequest)


class RequestTable:
    """Finds requests by key, by client id, by stream, by session and by worker handle.

    Ended requests whose clients may resume them are remembered apart from the others: a connection
    that breaks may end thousands at once, and no other request that ends may displace them.

    Args:
        max_ended: Number of ended requests that are remembered and cannot be resumed.
        max_lost: Number of ended requests that are remembered because their session was lost.
    """

    def __init__(self, max_ended: int, max_lost: int) -> None:
        self._max_ended, self._max_lost = max_ended, max_lost
        self._requests: dict[RequestKey, Request] = {}
        # Dispatched requests by handle; a handle is never used again.
        self._by_handle: dict[int, Request] = {}
        self._num_handles = 0
        self._by_session: dict[int, dict[int, Request]] = {}
        # Oldest first; a key is in one of them at most.
        self._ended: OrderedDict[RequestKey, EndedRequest] = OrderedDict()
        self._lost: OrderedDict[RequestKey, EndedRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, key: RequestKey) -> Request | None:
        return self._requests.get(key)

    def find(self, request_id: str, tenant: str) -> Request | EndedRequest | None:
        """Returns a request by its client's id; a running request is preferred to an ended one.

        Args:
            request_id: The client's id.
            tenant: Tenant of the request; empty: any tenant.

        Raises:
            InvalidArgument: `tenant` is empty and several tenants have a request of this id.
        """
        if tenant:
            key = RequestKey(request_name(tenant, request_id))
            return self._requests.get(key) or self.ended(key)
        found = dict[str, Request | EndedRequest]()
        for ended in (*self._ended.values(), *self._lost.values()):
            if ended.request_id == request_id:
                found[ended.tenant] = ended
        for request in self._requests.values():
            if request.submission.request_id == request_id:
                found[request.submission.tenant] = request
        return _only(found, request_id)

    def find_running(self, request_id: str, tenant: str) -> Request | None:
        """Like `find`, among requests that have not ended."""
        if tenant:
            return self._requests.get(RequestKey(request_name(tenant, request_id)))
        found = {
            request.submission.tenant: request
            for request in self._requests.values()
            if request.submission.request_id == request_id
        }
        return _only(found, request_id)

    def by_stream(self, to: StreamKey) -> Request | None:
        return self._by_session.get(to.session, {}).get(to.stream)

    def of_session(self, session: int, most: int | None = None) -> list[Request]:
        """Returns the requests of a session; at most `most`, if given."""
        return list(itertools.islice(self._by_session.get(session, {}).values(), most))

    def all(self) -> list[Request]:
        return list(self._requests.values())

    @property
    def by_handle(self) -> Mapping[int, Request]:
        """Requests with a running attempt, by the handle that workers use."""
        return self._by_handle

    def ended(self, key: RequestKey) -> EndedRequest | None:
        """Returns the record of a request that has ended, if it is remembered."""
        return self._lost.get(key) or self._ended.get(key)

    def recently_ended(self) -> list[EndedRequest]:
        """Returns the records of ended requests, newest first."""
        newest = (*reversed(self._lost.values()), *reversed(self._ended.values()))
        return sorted(newest, key=lambda one: -one.ended_at)

    def add(self, request: Request) -> None:
        to = request.submission.to
        request.fleet.num_requests += 1
        self._requests[request.key] = request
        self._by_session.setdefault(to.session, {})[to.stream] = request

    def redirect(self, request: Request, to: StreamKey) -> None:
        """Sends the events of a request to another stream from now on."""
        self.remove(request)
        request.submission = replace(request.submission, to=to)
        self.add(request)

    def move(self, request: Request, fleet: Fleet) -> None:
        """Moves a request to another fleet; hashes of its blocks are the fleet's own."""
        request.fleet.num_requests -= 1
        request.fleet, request.hashes = fleet, None
        fleet.num_requests += 1

    def remove(self, request: Request) -> None:
        """Removes a request; `end_attempt` removes the handle of its attempt."""
        to = request.submission.to
        request.fleet.num_requests -= 1
        del self._requests[request.key]
        session = self._by_session[to.session]
        del session[to.stream]
        if not session:
            del self._by_session[to.session]

    def remember(self, request: Request, record: EndedRequest) -> None:
        """Keeps the record of a removed request, and drops the oldest record beyond the limit."""
        self._ended.pop(request.key, None)
        self._lost.pop(request.key, None)
        if record.lost_digest is not None:
            self._lost[request.key] = record
        else:
            self._ended[request.key] = record
        while len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)
        while len(self._lost) > self._max_lost:
            self._lost.popitem(last=False)

    def begin_attempt(self, request: Request) -> None:
        """Gives the request's new attempt a handle."""
        self._num_handles += 1
        request.handle = self._num_handles
        self._by_handle[request.handle] = request

    def end_attempt(self, request: Request) -> None:
        """Removes the handle of the request's attempt; idempotent."""
        self._by_handle.pop(request.handle, None)


def _only(found: Mapping[str, Found], request_id: str) -> Found | None:
    """Returns the only request found. Raises InvalidArgument when several tenants have one."""
    if len(found) > 1:
        tenants = ", ".join(sorted(found))
        raise InvalidArgument("tenant", "", f"tenants {tenants} each have a request {request_id}")
    return next(iter(found.values()), None)
