"""One HTTP connection: uvicorn's protocol with limits on the resources that a peer may use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from baton.gateway.error_responses import HttpError
from baton.gateway.metrics import GatewayStats
from baton.runtime.config import HttpConfig
from baton.runtime.security.tls import Handshakes

# Time that a refused client has to read the error response before the connection is closed.
LINGER_S = 1.0


T = TypeVar("T")

# Key of the ChunkWriter in the ASGI scope's `extensions`.
CHUNK_WRITER = "baton.chunk_writer"


class ChunkWriter:
    """Writes parts of a response that has begun and not ended, without a coroutine each.

    Args:
        cycle: The request and its response, which has no known length.
    """

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def pusher(self, render: Callable[[T], bytes]) -> Callable[[T], bool]:
        """Returns a function that renders a value and writes it as a part of the response.

        The function returns False, and renders nothing, if the client reads too slowly or has left:
        ASGI's `send` waits until the client has read.

        Args:
            render: Renders a part; nothing is written for an empty one.
        """
        flow, transport = self._cycle.flow, self._cycle.transport
        is_closing, write = transport.is_closing, transport.write
        in_chunks = self._cycle.chunked_encoding

        def push(value: T) -> bool:
            if flow.write_paused or is_closing():
                return False
            if part := render(value):
                write(b"%x\r\n%b\r\n" % (len(part), part) if in_chunks else part)
            return True

        return push


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Makes a response without a length end with the connection, as HTTP/1.0 clients expect.

    They cannot read chunks (RFC 9112, 6.1), which uvicorn sends to them too. uvicorn closes their
    connections after each response.
    """
    send = cycle.send

    async def send_message(message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding = False
        elif cycle.chunked_encoding is False and not cycle.expected_content_length:
            # uvicorn compares each part with the length that remains.
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_message  # type: ignore[method-assign]


def protocol_factory(
    config: HttpConfig, stats: GatewayStats, handshakes: Handshakes | None = None
) -> Callable[..., asyncio.Protocol]:
    """Returns the factory of uvicorn's connections.

    Args:
        config: Limits of each connection and of their number.
        stats: Counts the connections and refusals.
        handshakes: Counts TLS handshakes; None without TLS.
    """
    waiting: dict[Connection, None] = {}

    def make(**arguments: Any) -> asyncio.Protocol:
        return Connection(config, stats, waiting, handshakes, **arguments)

    return make


class Connection(HttpToolsProtocol):
    """Limits the header bytes, the header time, idle readers and the number of connections.

    uvicorn has no such limits with httptools. uvicorn's own keep-alive timeout closes connections
    that are idle between two requests.

    Args:
        limits: Limits of each connection and of their number.
        stats: Counts the connections and refusals.
        waiting: All connections of the server without a complete request, oldest first; shared.
        handshakes: Counts TLS handshakes; None without TLS.
        **arguments: Passed to uvicorn's protocol.
    """

    def __init__(
        self,
        limits: HttpConfig,
        stats: GatewayStats,
        waiting: dict[Connection, None],
        handshakes: Handshakes | None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._limits, self._stats, self._waiting = limits, stats, waiting
        self._handshakes = handshakes
        # Bytes that the parser reads now, and the rest of them that the next parser reads.
        self._data: bytes | memoryview = b""
        self._rest: bytes | memoryview = b""
        # Bytes of the current request head: received, and parsed into whole headers.
        self._num_raw_bytes = self._num_parsed_bytes = 0
        self._in_head, self._num_heads = True, 0
        self._refusal: HttpError | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        # Bytes in the transport's buffer when the timer was started.
        self._num_unsent_bytes = 0
        # Requests without a complete response, in their order: uvicorn knows only the last one.
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._linger_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stats.num_connections = len(self.connections)
        if self._handshakes is not None:
            self._handshakes.succeeded()
        connection = transport.get_extra_info("socket")
        if connection is not None:
            # Unix sockets have no such option. Without TCP_NODELAY, a token that closely follows
            # another one waits for the peer's delayed acknowledgement (40 ms).
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self._limits.max_connections and not self._evict():
            message = f"{self._limits.max_connections} connections are open, the limit"
            self._refuse("connections", HttpError(503, message, kind="service_unavailable_error"))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        self._stats.num_connections = len(self.connections)
        self._waiting.pop(self, None)
        self._unset_keepalive_if_required()
        timers = self._head_timer, self._reader_timer, self._linger_timer, self._body_timer
        for timer in timers:
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return
        in_head, num_heads = self._in_head, self._num_heads
        self._parse(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if in_head and num_heads == self._num_heads:
            # on_header sees a header only when it is complete: count the bytes of partial headers.
            self._num_raw_bytes += len(data)
            if self._num_raw_bytes > self._limits.max_header_bytes:
                self._refuse("header_bytes", self._too_long())
        if self._in_head and not self._answering:
            self._await_head()

    def _parse(self, data: bytes | memoryview) -> None:
        while data and self._refusal is None:
            self._data, self._rest = data, b""
            super().data_received(data)  # type: ignore[arg-type]
            data = self._rest
        self._data = self._rest = b""

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._upgrades():
            return
        self._in_head = False
        self._num_heads += 1
        self._num_raw_bytes = self._num_parsed_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # The request's task has not run yet.
        if self.parser.get_http_version() == "1.0":
            _send_without_chunks(self.cycle)
        extensions: dict[str, Any] = {CHUNK_WRITER: ChunkWriter(self.cycle)}
        self.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        if self._upgrades():
            return
        self._in_head = True
        self._waiting.pop(self, None)
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if not self._answering and not self.transport.is_closing():
            self._waiting[self] = None
            if not self._in_head:
                # The answer did not need the rest of the body. uvicorn would wait for it without
                # end, because each part of it stops the keep-alive timeout.
                self._body_timer = self.loop.call_later(
                    self._limits.read_timeout_s, self.transport.close
                )

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._reader_timer is None:
            self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def send_400_response(self, msg: str) -> None:
        """Refuses a malformed request, or one that a parser callback has refused."""
        if self._refusal is not None:
            self._refuse("header_bytes", self._refusal)
        else:
            self._refuse("malformed", HttpError(400, msg, code="invalid_http"))

    def _upgrades(self) -> bool:
        """Whether the request head asks for another protocol.

        Such a head is parsed a second time without its `upgrade` header.
        """
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def _unsupported_upgrade_warning(self) -> None:
        """Ignores the upgrade and continues in HTTP/1.1, as RFC 9110, 7.8 allows.

        The parser treats the bytes after the head as another protocol, but they are the request
        body: some clients (by default Java's HttpClient) ask for HTTP/2 in their first request.
        """
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        if not self._upgrades():
            super()._unsupported_upgrade_warning()
            return
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser, self._num_parsed_bytes = httptools.HttpRequestParser(self), 0
        # A view, not a copy, and parsed by _parse, not recursively: one chunk may hold many such
        # requests.
        self._rest = memoryview(self._data)[upgrade.args[0] :]
        super().data_received(b"\r\n".join(lines) + b"\r\n\r\n")

    def _count(self, num_bytes: int) -> None:
        self._num_parsed_bytes += num_bytes
        if self._num_parsed_bytes > self._limits.max_header_bytes:
            self._refusal = self._too_long()
            # An exception from a callback stops the parser.
            raise httptools.HttpParserError("headers too long")

    def _too_long(self) -> HttpError:
        message = f"the request's head is longer than {self._limits.max_header_bytes} bytes"
        return HttpError(431, message, code="headers_too_large")

    def _evict(self) -> bool:
        """Closes the connection that has been without a complete request for longest.

        Idle connections and slow requests can thus not keep other clients out.

        Returns:
            Whether there was such a connection.
        """
        if not self._waiting:
            return False
        oldest = next(iter(self._waiting))
        del self._waiting[oldest]
        self._stats.refused_connections["evicted"] += 1
        oldest.transport.abort()
        return True

    def _await_head(self) -> None:
        self._waiting.setdefault(self)
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.read_timeout_s, self._on_slow_head)

    def _on_slow_head(self) -> None:
        self._head_timer = None
        message = f"the request's head was not complete within {self._limits.read_timeout_s:g} s"
        self._refuse("slow_head", HttpError(408, message, code="request_timeout"))

    def _await_reader(self) -> None:
        self._num_unsent_bytes = self.transport.get_write_buffer_size()
        self._reader_timer = self.loop.call_later(
            self._limits.write_timeout_s, self._on_idle_reader
        )

    def _on_idle_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._num_unsent_bytes:
            # The client reads, but a large response takes longer than the timeout.
            self._await_reader()
            return
        self._stats.refused_connections["idle_reader"] += 1
        # Abort instead of close: the peer does not read the buffered bytes.
        self.transport.abort()

    def _refuse(self, reason: str, problem: HttpError) -> None:
        self._refusal = problem
        self._stats.refused_connections[reason] += 1
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
        if self._answering or self.transport.is_closing():
            # An error response must not be written into the middle of another response.
            self.transport.close()
            return
        body = problem.body()
        self.transport.write(
            STATUS_LINE[problem.status]
            + b"content-type: application/json\r\nconnection: close\r\n"
            + b"content-length: %d\r\n\r\n" % len(body)
            + body
        )
        # If the connection were closed at once with unread bytes, TCP would reset it and the client
        # might lose the response.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
