"""Sends a request to a route of this process, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

# Statuses that say nothing about the request: no coordinator or worker can serve now, or the ID was
# in use. The request is sent again after this time unless the response has another one.
_NOT_ITS_FAULT, _RETRY_S = (409, 503), 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a route.

    Attributes:
        status: HTTP status.
        request_id: ID of the request.
        body: JSON.
        retry_after_s: Seconds after which the request may be sent again, if the response is no
            answer to the request but a refusal for now; None: it is an answer.
    """

    status: int
    request_id: str
    body: bytes
    retry_after_s: float | None


async def post(
    route: ASGIApp, path: str, body: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> Answer:
    """Sends a JSON body to a generation route; cancelling this call cancels the request."""
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*own, *headers],
        "client": None,
        "server": None,
    }
    unread = [body]
    start: Message = {}
    parts: list[bytes] = []

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        # A client that stays: the route stops waiting for its disconnect when it has answered.
        await asyncio.get_running_loop().create_future()
        raise AssertionError("not reached")

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await route(scope, receive, send)
    found = Headers(raw=start["headers"])
    return Answer(
        start["status"],
        found.get("x-request-id", ""),
        b"".join(parts),
        _retry_after_s(start["status"], found),
    )


def _retry_after_s(status: int, headers: Headers) -> float | None:
    told = headers.get("retry-after-ms")
    if status in _NOT_ITS_FAULT or (status == 429 and told is not None):
        return int(told) / 1e3 if told is not None else _RETRY_S
    return None
