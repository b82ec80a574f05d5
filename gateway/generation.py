"""Serves the generation routes: turns an HTTP request into client requests and streams back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from google.rpc import code_pb2
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.client import Completion, Finished, RequestOptions, Tokens, TokenStream
from baton.client.errors import AlreadyExistsError
from baton.gateway import body_reader, error_responses, parsed_request
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cell import Cell
from baton.gateway.cells import Cells
from baton.gateway.choices import Choices, gather, incomplete_stream
from baton.gateway.connections import CHUNK_WRITER, ChunkWriter
from baton.gateway.coordinator_queries import request_credential
from baton.gateway.dialect import ChoiceRenderer, Dialect, DialectRequest, ResponseStream
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError
from baton.gateway.metrics import GatewayStats, RouteStats
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt, render_prompts
from baton.gateway.response_rendering import ResponseHead
from baton.runtime.config import HttpConfig
from baton.runtime.errors import RemoteError, shown
from baton.runtime.names import REQUEST_IDS

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChatOutputParser, ChoiceOutputParser
    from baton.runtime.prompts.tokenization import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

_JSON = (b"content-type", b"application/json")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Tells nginx not to buffer the response, which would delay tokens.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Generation:
    """The endpoint of one generation route, as an ASGI application."""

    dialect: Dialect
    cells: Cells
    config: HttpConfig
    bodies: body_reader.BodyReader
    stats: GatewayStats
    slots: CallerSlots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self, scope, receive, send).run()


class Exchange:
    """Serves one HTTP request; cancels its token streams when the client disconnects."""

    def __init__(self, route: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        self._route, self._receive, self._send = route, receive, send
        self._dialect = route.dialect
        self._headers = self._dialect.headers(Headers(scope=scope))
        self._writer: ChunkWriter | None = scope.get("extensions", {}).get(CHUNK_WRITER)
        self._started_at = time.monotonic()
        # The client's name of the request; proxies give several requests the same one.
        self._header_id = self._headers.get("x-request-id", "")
        # ID of the request without the header.
        self._own_id = parsed_request.new_request_id(self._dialect.id_prefix)
        # ID of the request, which no other running request of the tenant has.
        self._id = self._header_id or self._own_id
        # The request as it was read, and the response that streams.
        self._dialect_request: DialectRequest | None = None
        self._stream: ResponseStream | None = None
        self._choices: Choices | None = None
        # The cells that the request was sent to first and last.
        self._first: Cell | None = None
        self._cell: Cell | None = None
        self._disconnected = self._response_started = False
        # Choices of a streamed response that have not ended, and the last chunk of the last one.
        self._num_streaming, self._last_chunk = 0, b""

    async def run(self) -> None:
        stats, status, slot = self._route.stats, 200, contextlib.ExitStack()
        watcher: asyncio.Task[None] | None = None
        request: ParsedRequest | None = None
        try:
            body = await self._route.bodies.read(self._receive, self._headers)
            # Count a request only after its body is complete, so that slow clients occupy no slot.
            slot.enter_context(self._route.slots.hold(request_credential(self._headers)))
            dialect_request = await self._dialect.read(body, self._headers)
            self._dialect_request = dialect_request
            request = self._parsed(dialect_request)
            session = request.options.get("session_id") or request.id
            cells = await self._route.cells.candidates(
                request.options.get("model"), session, request_credential(self._headers)
            )
            watcher = asyncio.create_task(self._watch(), name="watch for a client disconnect")
            await self._try_cells(cells, request, dialect_request)
            self._latencies(request).e2e.observe(time.monotonic() - self._started_at)
        except body_reader.ClientDisconnected:
            status = CLIENT_CLOSED_REQUEST
        except (HttpError, RemoteError) as error:
            problem = self._as_http_error(error, request)
            status = CLIENT_CLOSED_REQUEST if self._disconnected else problem.status
            if not self._disconnected:
                await self._fail(problem)
        except asyncio.CancelledError:
            status = 503
            raise
        except Exception:
            status = 500
            _log.exception("HTTP request failed", extra={"request_id": self._id})
            await self._fail(error_responses.internal_error())
        finally:
            # The counts come first: the awaits below may be cancelled.
            slot.close()
            stats.requests[self._dialect.path, status] += 1
            self._count_failover()
            if watcher is not None:
                watcher.cancel()
            if self._stream is not None:
                self._stream.close()
            await self._close_streams()

    async def _try_cells(
        self, cells: Sequence[Cell], request: ParsedRequest, dialect_request: DialectRequest
    ) -> None:
        """Serves the request from the first cell that can be reached."""
        self._first = cells[0]
        for number, cell in enumerate(cells, start=1):
            try:
                try:
                    await self._serve_from(cell, request, dialect_request)
                except AlreadyExistsError:
                    if request.id != self._header_id or self._response_started:
                        raise
                    await self._close_streams()
                    request = self._with_own_id(request, "is the ID of a running request")
                    await self._serve_from(cell, request, dialect_request)
                return
            except RemoteError as error:
                self._route.cells.report_failure(cell, error)
                is_unreachable = error.code == code_pb2.UNAVAILABLE
                # Once the response has begun, only this cell can finish it.
                if (
                    self._response_started
                    or self._disconnected
                    or not is_unreachable
                    or number == len(cells)
                ):
                    raise
                await self._close_streams()

    def _count_failover(self) -> None:
        """Counts a failover if the request was served by another cell than its first one."""
        first = self._first
        streams = self._choices.streams if self._choices is not None else ()
        taken_at = {stream.address for stream in streams} - {None}
        if first is not None and not taken_at <= {*first.client.addresses}:
            self._route.cells.failovers[first.name] += 1

    async def _serve_from(
        self, cell: Cell, request: ParsedRequest, dialect_request: DialectRequest
    ) -> None:
        output_parser = await self._output_parser(cell, dialect_request)
        if output_parser is not None:
            request = output_parser.adjust_request(request)
        tokenizer = await self._tokenizer(cell, request, output_parser)
        if self._disconnected:
            # There was no stream yet that the disconnect could have closed.
            raise body_reader.ClientDisconnected
        requests = list(request.choice_requests())

        def submit(index: int, timeout_s: float | None) -> TokenStream:
            prompt, options = requests[index]
            if timeout_s is not None:
                options = {**options, "timeout_s": timeout_s}
            return cell.client.generate(prompt, **options)

        self._choices = Choices(len(requests), submit, self._remaining_s(request.options))
        self._cell = cell
        await (self._respond_stream if request.stream else self._respond_whole)(
            self._choices, request, dialect_request, tokenizer, output_parser
        )

    def _remaining_s(self, options: RequestOptions) -> float | None:
        """The request's timeout in seconds, less what attempts at other cells took; None: none."""
        timeout_s = options.get("timeout_s")
        if timeout_s is None or self._cell is None:
            return timeout_s
        return max(0.001, timeout_s - (time.monotonic() - self._started_at))

    async def _close_streams(self) -> None:
        choices, self._choices = self._choices, None
        if choices is not None:
            await choices.aclose()

    def _parsed(self, dialect_request: DialectRequest) -> ParsedRequest:
        """Converts the request for the coordinator, and determines its ID. Raises HttpError."""
        if dialect_request.request_id is not None:
            self._own_id = dialect_request.request_id
            self._id = self._header_id or self._own_id
        request = dialect_request.parsed(self._id, self._headers)
        request.options["route"] = self._dialect.path
        limit = self._route.config.max_choices
        if request.num_choices > limit:
            allowed = f"prompts times n must be at most {limit}, is {request.num_choices}"
            raise error_responses.invalid_value("n", request.n, allowed)
        if request.id == self._header_id and not request.has_valid_id:
            request = self._with_own_id(request, f"is not {REQUEST_IDS}")
        return request

    def _as_http_error(
        self, error: HttpError | RemoteError, request: ParsedRequest | None
    ) -> HttpError:
        if isinstance(error, RemoteError):
            names = request.names if request is not None else {}
            error = error_responses.from_remote_error(error, names)
        asked = self._dialect_request
        return asked.named(error) if asked is not None else error

    async def _output_parser(
        self, cell: Cell, dialect_request: DialectRequest
    ) -> ChatOutputParser | None:
        chat = dialect_request.chat
        if chat is None:
            return None
        if cell.parsers is not None:
            return await cell.parsers.chat(
                chat,
                request_credential(self._headers),
                lowers_effort=self._dialect.lowers_effort,
            )
        if chat.may_call:
            raise error_responses.tools_unsupported()
        return None

    def _with_own_id(self, request: ParsedRequest, reason: str) -> ParsedRequest:
        """Returns the request with the ID that it has without the header `x-request-id`."""
        self._id = self._own_id
        extra = {"request_id": self._id}
        _log.info("x-request-id: %s %s", shown(self._header_id), reason, extra=extra)
        return replace(request, id=self._id)

    async def _tokenizer(
        self, cell: Cell, request: ParsedRequest, output_parser: ChatOutputParser | None
    ) -> Tokenizer | None:
        field = request.needs_tokenizer
        if field is None and (output_parser is None or not output_parser.needs_prompt):
            return None
        return await cell.tokenizer.get(request_credential(self._headers), field)

    async def _watch(self) -> None:
        """Closes the token streams when the client disconnects, which ends `run`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        if self._choices is not None:
            await self._choices.aclose()

    async def _respond_whole(
        self,
        choices: Choices,
        request: ParsedRequest,
        dialect_request: DialectRequest,
        tokenizer: Tokenizer | None,
        output_parser: ChatOutputParser | None,
    ) -> None:
        await choices.admit()
        indices = range(request.num_choices)
        completions = await gather([self._read_choice(request, choices, one) for one in indices])
        head = ResponseHead(request, completions[0].model, int(time.time()))
        prompts = await render_prompts(request, tokenizer)
        parsers = _parsers(request, prompts, output_parser)

        def body() -> bytes:
            return dialect_request.whole(head, completions, prompts, parsers)

        # Serializing the details of a long prompt takes long: a thread keeps other tokens flowing.
        long = "prompt_logprobs" in request.options or request.return_token_ids
        await self._send_response(200, [_JSON], await asyncio.to_thread(body) if long else body())

    async def _read_choice(
        self, request: ParsedRequest, choices: Choices, index: int
    ) -> Completion:
        """Reads the whole output of one choice and records its latencies."""
        parts: list[Tokens] = []
        latency = _LatencyRecorder(self._latencies(request), self._started_at)
        accepted = await choices.admitted(index)
        async for event in choices.streams[index]:
            if isinstance(event, Tokens):
                latency.record_delta()
                parts.append(event)
            elif isinstance(event, Finished):
                choices.ended()
                return Completion.of(accepted.request_id, accepted.model, parts, event)
        raise incomplete_stream()

    async def _respond_stream(
        self,
        choices: Choices,
        request: ParsedRequest,
        dialect_request: DialectRequest,
        tokenizer: Tokenizer | None,
        output_parser: ChatOutputParser | None,
    ) -> None:
        """Sends the response as server-sent events.

        The HTTP status is sent after each choice is admitted, or waits for a limit of the caller,
        and the first one has output, so that a refusal becomes an HTTP status and not an event.
        """
        first = await choices.admit()
        prompts = await render_prompts(request, tokenizer)
        parsers = _parsers(request, prompts, output_parser)
        if self._stream is not None:
            # An attempt at another cell.
            self._stream.close()
        head = ResponseHead(request, first.model, int(time.time()))
        self._stream = response = dialect_request.stream(head)

        async def stream_choice(index: int) -> Finished:
            accepted = await choices.admitted(index)
            renderer = response.choice(
                index,
                accepted.prompt_tokens,
                prompts[index // request.n],
                parsers[index] if parsers else None,
            )
            finished = await self._stream_choice(request, choices.streams[index], renderer)
            choices.ended()
            return finished

        self._num_streaming = request.num_choices
        # One task per choice: a token then wakes up its choice only.
        finished = await gather(
            [asyncio.create_task(stream_choice(index)) for index in range(request.num_choices)]
        )
        end = response.end([one.usage for one in finished], parsers)
        await self._write(self._last_chunk + end, more=False)

    async def _stream_choice(
        self, request: ParsedRequest, stream: TokenStream, renderer: ChoiceRenderer
    ) -> Finished:
        """Sends one chunk per delta of a choice; the last chunk has the finish reason.

        `_respond_stream` sends the last chunk of the choice that ends last, together with the end
        of the response, because each write costs a system call.
        """
        latency = _LatencyRecorder(self._latencies(request), self._started_at)
        writer = self._writer
        while events := await stream.read():
            parts: list[bytes] = []
            tokens: Tokens | None = None
            finished: Finished | None = None
            for event in events:
                if isinstance(event, Tokens):
                    latency.record_delta()
                    if tokens is not None:
                        parts.append(renderer.render(tokens, None))
                    tokens = event
                elif isinstance(event, Finished):
                    finished = event
            # The finish reason is sent in the same chunk as the last tokens.
            parts.append(renderer.render(tokens, finished))
            body = b"".join(parts)
            if finished is not None:
                self._num_streaming -= 1
                if not self._num_streaming:
                    self._last_chunk = body
                elif body:
                    await self._write(body)
                return finished
            if not body:
                continue
            await self._write(body)
            if writer is not None:
                # The response has begun: later chunks need no task to be written.
                render_delta = renderer.delta_renderer(latency.record_delta)
                if render_delta is not None:
                    stream.push_to(writer.pusher(render_delta))
                writer = None
        raise incomplete_stream()

    @property
    def _shown_id(self) -> str:
        """The request's ID in the response: the client's name of it, if it has one."""
        return self._header_id or self._id

    def _latencies(self, request: ParsedRequest) -> RouteStats:
        return self._route.stats.latencies[self._dialect.path, request.lane]

    async def _write(self, chunks: bytes, *, more: bool = True) -> None:
        if not self._response_started:
            await self._start(200, _SSE)
        await self._send({"type": "http.response.body", "body": chunks, "more_body": more})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._response_started = True
        cell = self._cell
        if status == 200 and cell is not None and not self._route.cells.is_unreachable(cell):
            cell.outage.served()
        shown_id = self._shown_id.encode("latin-1", "replace")
        own = [(name, shown_id) for name in self._dialect.request_id_headers]
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, *own]}
        )

    async def _send_response(
        self,
        status: int,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
        *,
        last: bool = True,
    ) -> None:
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length])
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})

    async def _fail(self, problem: HttpError) -> None:
        if self._response_started:
            # A response that does not stream is sent whole, and nothing can fail behind it.
            end = self._stream.failure(problem, self._shown_id) if self._stream is not None else b""
            await self._send({"type": "http.response.body", "body": end, "more_body": False})
            return
        headers = [_JSON, *problem.headers()]
        body = self._dialect.error_body(problem, self._shown_id)
        if problem.status not in body_reader.UNREAD_BODY_STATUSES:
            await self._send_response(problem.status, headers, body)
            return
        headers.append((b"connection", b"close"))
        await self._send_response(problem.status, headers, body, last=False)
        await body_reader.discard_body(self._receive)
        await self._send({"type": "http.response.body", "body": b""})


class _LatencyRecorder:
    """Records TTFT and the gaps between the deltas of one choice."""

    __slots__ = ("_has_first", "_last_at", "_stats")

    def __init__(self, stats: RouteStats, started_at: float) -> None:
        self._stats, self._last_at, self._has_first = stats, started_at, False

    def record_delta(self) -> None:
        now = time.monotonic()
        histogram = self._stats.itl if self._has_first else self._stats.ttft
        histogram.observe(now - self._last_at)
        self._last_at, self._has_first = now, True


def _parsers(
    request: ParsedRequest,
    prompts: Sequence[RenderedPrompt],
    output_parser: ChatOutputParser | None,
) -> list[ChoiceOutputParser]:
    """Makes one output parser per choice; an empty list if outputs are not parsed."""
    if output_parser is None:
        return []
    token_ids = prompts[0].token_ids if output_parser.needs_prompt else ()
    return output_parser.choices(request.num_choices, token_ids)
