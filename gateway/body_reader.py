"""Reads request bodies, with a limit on their bytes and on the time that they take."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.connections import LINGER_S
from baton.gateway.error_responses import HttpError
from baton.runtime.config import HttpConfig
from baton.runtime.errors import shown

# Error statuses after which part of the request body is still unread.
UNREAD_BODY_STATUSES = (408, 413, 415)


class ClientDisconnected(Exception):
    """The HTTP client closed its connection before the response was complete."""


async def read_body(receive: Receive, headers: Mapping[str, str], config: HttpConfig) -> bytes:
    """Reads a whole JSON body.

    Args:
        receive: The ASGI receive function of the request.
        headers: The request's headers.
        config: Gives the limits `max_body_bytes` and `read_timeout_s`.

    Raises:
        ClientDisconnected: The client left before the body was complete.
        HttpError: The content type is not JSON or the body is compressed (415), the body is too
            long (413), or the body does not arrive in time (408).
    """
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Browsers send other content types across origins without a preflight request (CORS).
        message = f"content-type is {shown(kind)}; must be application/json"
        raise HttpError(415, message, param="content-type", code="unsupported_media_type")
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"content-encoding is {shown(encoding)}; must be identity or left out"
        raise HttpError(415, message, param="content-encoding", code="unsupported_media_type")
    limit, timeout_s = config.max_body_bytes, config.read_timeout_s
    too_large = HttpError(413, f"the body is longer than {limit} bytes", code="body_too_large")
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    parts: list[bytes] = []
    num_bytes, more = 0, True
    try:
        async with asyncio.timeout(timeout_s):
            while more:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(event.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > limit:
                    raise too_large
                more = event.get("more_body", False)
    except TimeoutError:
        message = f"the request body was not complete within {timeout_s:g} s"
        raise HttpError(408, message, code="request_timeout") from None
    return b"".join(parts)


class _UnreadBodyResponse(Response):
    """An error response to a request whose body is not fully read; closes the connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": [*self.raw_headers, (b"connection", b"close")],
            }
        )
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await discard_body(receive)
        await send({"type": "http.response.body", "body": b""})


def response_class(status: int) -> type[Response]:
    """Returns the class of an error response with this status."""
    return _UnreadBodyResponse if status in UNREAD_BODY_STATUSES else Response


async def discard_body(receive: Receive) -> None:
    """Reads and drops the rest of a request body, for at most LINGER_S.

    If the gateway closed the connection with unread data, TCP would reset the connection and the
    client might lose the response.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
