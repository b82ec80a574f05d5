"""Reads request bodies, with limits on their bytes, together and each, and on their time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.gateway.connections import LINGER_S
from baton.gateway.coordinator_queries import caller_name
from baton.gateway.error_responses import HttpError
from baton.runtime.config import HttpConfig
from baton.runtime.errors import shown
from baton.runtime.fair_places import FairPlaces

# Error statuses after which part of the request body is still unread.
UNREAD_BODY_STATUSES = (408, 413, 415)
# The memory of incomplete bodies is counted in blocks of this size. uvicorn buffers as much of each
# connection.
_BLOCK_BYTES = 64 * 2**10
# All incomplete bodies together may have the bytes of this many bodies of the largest size.
_MOST_BODIES = 32


class ClientDisconnected(Exception):
    """The HTTP client closed its connection before the response was complete."""


class BodyReader:
    """Reads whole JSON bodies, and bounds the memory of all bodies that are not complete yet.

    Together, such bodies may have the bytes of _MOST_BODIES bodies of the largest size; a caller
    that has less than its share may use more, up to twice as many (FairPlaces). Callers without a
    credential cannot be told apart and count as one. The first bytes of each body, fewer than
    _BLOCK_BYTES, do not count: `http.max_connections` bounds them, and nearly all bodies are
    shorter.

    Args:
        config: Gives the limits `max_body_bytes` and `read_timeout_s`.
    """

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        num_blocks = _MOST_BODIES * config.max_body_bytes // _BLOCK_BYTES
        # A place is a block of an incomplete body.
        self._blocks = FairPlaces(max(1, num_blocks))

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes:
        """Reads a whole body.

        Args:
            receive: The ASGI receive function of the request.
            headers: The request's headers.

        Raises:
            ClientDisconnected: The client left before the body was complete.
            HttpError: The content type is not JSON or the body is compressed (415), the body is too
                long (413) or does not arrive in time (408), or incomplete bodies use too much
                memory (429).
        """
        _check_type(headers)
        limit, timeout_s = self._config.max_body_bytes, self._config.read_timeout_s
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise body_too_large(limit)
        parts: list[bytes] = []
        num_bytes, more = 0, True
        with self._incomplete(headers) as grow:
            try:
                async with asyncio.timeout(timeout_s):
                    while more:
                        event = await receive()
                        if event["type"] == "http.disconnect":
                            raise ClientDisconnected
                        parts.append(event.get("body", b""))
                        num_bytes += len(parts[-1])
                        if num_bytes > limit:
                            raise body_too_large(limit)
                        more = event.get("more_body", False)
                        if more:
                            grow(num_bytes)
            except TimeoutError:
                message = f"the request body was not complete within {timeout_s:g} s"
                raise HttpError(408, message, code="request_timeout") from None
        return b"".join(parts)

    @contextlib.contextmanager
    def _incomplete(self, headers: Mapping[str, str]) -> Iterator[Callable[[int], None]]:
        """Counts the blocks of one incomplete body until the context ends.

        Yields:
            A function to call with the number of bytes that have arrived. It raises HttpError (429)
            if there is no room for them.
        """
        blocks, num_taken, caller = self._blocks, 0, ""

        def grow(num_bytes: int) -> None:
            nonlocal num_taken, caller
            while num_bytes // _BLOCK_BYTES > num_taken:
                if not num_taken:
                    caller = _caller(headers)
                if not blocks.has_room(caller):
                    raise HttpError(
                        429,
                        "incomplete request bodies hold "
                        f"{len(blocks) * _BLOCK_BYTES / 2**20:.0f} MiB of this gateway's memory, "
                        "no more are allowed now",
                        kind="rate_limit_error",
                        code="gateway_full",
                        retry_after_s=1.0,
                    )
                blocks.take(caller)
                num_taken += 1

        try:
            yield grow
        finally:
            for _ in range(num_taken):
                blocks.give_back(caller)


def body_too_large(limit: int) -> HttpError:
    """The error for a body with more bytes than the limit."""
    return HttpError(413, f"the body is longer than {limit} bytes", code="body_too_large")


def _check_type(headers: Mapping[str, str]) -> None:
    """Raises HttpError (415) if the body is not plain JSON."""
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # Browsers send other content types across origins without a preflight request (CORS).
        message = f"content-type is {shown(kind)}; must be application/json"
        raise HttpError(415, message, param="content-type", code="unsupported_media_type")
    encoding = headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        message = f"content-encoding is {shown(encoding)}; must be identity or left out"
        raise HttpError(415, message, param="content-encoding", code="unsupported_media_type")


def _caller(headers: Mapping[str, str]) -> str:
    """Identifies the caller by its credential, which is not checked yet; empty if it has none."""
    return caller_name(headers.get("authorization") or headers.get("x-api-key", ""))


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
