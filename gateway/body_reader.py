"""Bodies of requests on their way in: bounded in bytes and in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Receive

from baton.gateway.connections import LINGER_S
from baton.gateway.error_responses import HttpError
from baton.runtime.config import HttpConfig
from baton.runtime.errors import shown

# Statuses of problems that leave something of the body to read.
UNREAD_BODY_STATUSES = (408, 413, 415)


class ClientDisconnected(Exception):
    """Nobody reads the answer any more."""


async def read_body(receive: Receive, headers: Mapping[str, str], config: HttpConfig) -> bytes:
    """A whole body of JSON.

    Raises:
        ClientLeft: before it was whole.
        HttpError: it is of another type, too long, or comes too slowly.
    """
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        # A web page may send any other type to any server, this one without asking first.
        what = f"content-type is {shown(kind)}; must be application/json"
        raise HttpError(415, what, param="content-type", code="unsupported_media_type")
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
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                num_bytes += len(parts[-1])
                if num_bytes > limit:
                    raise too_large
                more = message.get("more_body", False)
    except TimeoutError:
        what = f"no whole body within {timeout_s:g} s"
        raise HttpError(408, what, code="request_timeout") from None
    return b"".join(parts)


async def discard_body(receive: Receive) -> None:
    """Drops what the client still sends, for a moment.

    Closed with something unread the connection would be reset, and the answer lost.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body"):
                    return
