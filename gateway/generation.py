"""One generation: from an HTTP request to requests of the session, and their events back."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from google.rpc import code_pb2
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from baton.client import (
    Accepted,
    Completion,
    Event,
    Finished,
    Tokens,
    TokenStream,
    errors,
)
from baton.gateway import (
    body_parser,
    body_reader,
    error_responses,
    parsed_request,
    request_bodies,
    response_rendering,
)
from baton.gateway.cell import Cell
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import request_credential
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError
from baton.gateway.metrics import GatewayStats, RouteStats
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt, render_prompts
from baton.gateway.request_bodies import ChatBody, GenerationBody
from baton.runtime.config import HttpConfig
from baton.runtime.errors import RemoteError

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChatOutputParser, ChoiceOutputParser
    from baton.runtime.tokenization import Tokenizer

T = TypeVar("T")

_log = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_JSON = (b"content-type", b"application/json")
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Of nginx, which would hold tokens back.
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Generation:
    """A route's endpoint, as an ASGI application."""

    route: str
    cells: Cells
    config: HttpConfig
    stats: GatewayStats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(self, scope, receive, send).run()


class Exchange:
    """One request and its answer. Leaving is enough to cancel: the streams are closed at once."""

    def __init__(self, to: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        self._to, self._receive, self._send = to, receive, send
        self._headers = Headers(scope=scope)
        self._began_at = time.monotonic()
        chat = to.route == CHAT
        self._id = self._headers.get("x-request-id") or parsed_request.new_request_id(chat=chat)
        self._streams: list[TokenStream] = []
        # That was asked first, and last.
        self._first: Cell | None = None
        self._cell: Cell | None = None
        self._left = self._started = False

    async def run(self) -> None:
        stats, status, running = self._to.stats, 200, False
        watch: asyncio.Task[None] | None = None
        request: ParsedRequest | None = None
        try:
            body = await body_reader.read_body(self._receive, self._headers, self._to.config)
            # One whose body comes slowly takes nobody's place.
            if stats.num_running >= self._to.config.max_running_requests:
                raise self._too_many()
            stats.num_running += 1
            running = True
            request, chat = self._parse_body(body)
            session = request.options.get("session_id") or request.id
            cells = await self._to.cells.candidates(
                request.options.get("model"), session, request_credential(self._headers)
            )
            watch = asyncio.create_task(self._watch(), name="watch for the client's leaving")
            await self._try(cells, request, chat)
            self._latencies(request).e2e.observe(time.monotonic() - self._began_at)
        except body_reader.ClientDisconnected:
            status = CLIENT_CLOSED_REQUEST
        except (HttpError, RemoteError) as error:
            names = request.names if request is not None else {}
            problem = (
                error
                if isinstance(error, HttpError)
                else error_responses.from_remote_error(error, names)
            )
            status = CLIENT_CLOSED_REQUEST if self._left else problem.status
            if not self._left:
                await self._fail(problem)
        except asyncio.CancelledError:
            status = 503
            raise
        except Exception:
            status = 500
            _log.exception("request failed", extra={"request_id": self._id})
            await self._fail(HttpError(500, "internal error", kind="server_error", code="internal"))
        finally:
            # What must be done comes before what can be cancelled.
            stats.num_running -= running
            stats.requests[self._to.route, status] += 1
            self._count_failover()
            if watch is not None:
                watch.cancel()
            await self._close_streams()

    async def _try(
        self, cells: Sequence[Cell], request: ParsedRequest, chat: ChatBody | None
    ) -> None:
        """Has the first cell that can be reached answer."""
        self._first = cells[0]
        for number, cell in enumerate(cells, start=1):
            try:
                await self._answer_from(cell, self._in_time(request), chat)
                return
            except RemoteError as error:
                self._to.cells.failed(cell, error)
                is_unreachable = error.code == code_pb2.UNAVAILABLE
                # What the client has been told of an answer is that cell's to finish.
                if self._started or self._left or not is_unreachable or number == len(cells):
                    raise
                await self._close_streams()

    def _count_failover(self) -> None:
        """Counts a request that another cell has taken than the one that was asked first."""
        first = self._first
        taken_at = {stream.address for stream in self._streams} - {None}
        if first is not None and not taken_at <= {*first.client.addresses}:
            self._to.cells.failovers[first.name] += 1

    async def _answer_from(self, cell: Cell, request: ParsedRequest, chat: ChatBody | None) -> None:
        output_parser = await self._output_parser(cell, chat) if chat is not None else None
        if output_parser is not None:
            request = output_parser.adjust_request(request)
        tokenizer = await self._tokenizer(cell, request, output_parser)
        for prompt, options in request.choice_requests():
            self._streams.append(cell.client.generate(prompt, **options))
        self._cell = cell
        await (self._stream if request.stream else self._complete)(
            request, tokenizer, output_parser
        )

    def _in_time(self, request: ParsedRequest) -> ParsedRequest:
        """The request with what is left of its time; all of it where no cell was tried yet."""
        timeout_s = request.options.get("timeout_s")
        if timeout_s is None or self._cell is None:
            return request
        left_s = max(0.001, timeout_s - (time.monotonic() - self._began_at))
        return replace(request, options={**request.options, "timeout_s": left_s})

    async def _close_streams(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.aclose()

    def _parse_body(self, body: bytes) -> tuple[ParsedRequest, ChatBody | None]:
        chat: ChatBody | None = None
        if self._to.route == CHAT:
            chat = body_parser.parse_body(body, request_bodies.ChatBody)
            request = parsed_request.from_chat_body(chat, self._named(chat), self._headers)
        else:
            completion = body_parser.parse_body(body, request_bodies.CompletionBody)
            request = parsed_request.from_completion_body(
                completion, self._named(completion), self._headers
            )
        limit = self._to.config.max_choices
        if request.num_choices > limit:
            allowed = f"prompts times n may be at most {limit}, and are {request.num_choices}"
            raise error_responses.invalid_value("n", request.n, allowed)
        return request, chat

    async def _output_parser(self, cell: Cell, chat: ChatBody) -> ChatOutputParser | None:
        if cell.parsers is not None:
            return await cell.parsers.chat(chat, request_credential(self._headers))
        if chat.may_call:
            raise error_responses.tools_unsupported()
        return None

    def _named(self, body: GenerationBody) -> str:
        """The request's id, which its body may say where no header does."""
        if body.request_id is not None and not self._headers.get("x-request-id"):
            self._id = body.request_id
        return self._id

    async def _tokenizer(
        self, cell: Cell, request: ParsedRequest, output_parser: ChatOutputParser | None
    ) -> Tokenizer | None:
        field = request.needs_tokenizer
        if field is None and (output_parser is None or not output_parser.needs_prompt):
            return None
        return await cell.tokenizer.get(request_credential(self._headers), field)

    async def _watch(self) -> None:
        """Ends everything when the client is gone: its reader then sees the streams closed."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        for stream in self._streams:
            await stream.aclose()

    async def _complete(
        self,
        request: ParsedRequest,
        tokenizer: Tokenizer | None,
        output_parser: ChatOutputParser | None,
    ) -> None:
        readings = [self._whole(request, stream) for stream in self._streams]
        completions = await _all(readings)
        head = response_rendering.ResponseHead(request, completions[0].model, int(time.time()))
        prompts = await render_prompts(request, tokenizer)
        parsers = _parsers(request, prompts, output_parser)

        def body() -> bytes:
            return json.dumps(
                response_rendering.full_response(head, completions, prompts, parsers)
            ).encode()

        # To write all that is known of a long prompt takes longer than others' tokens should wait.
        long = "prompt_logprobs" in request.options or request.return_token_ids
        await self._answer(200, [_JSON], await asyncio.to_thread(body) if long else body())

    async def _whole(self, request: ParsedRequest, stream: TokenStream) -> Completion:
        """A choice's answer, its latencies counted."""
        parts: list[Tokens] = []
        clock = _Clock(self._latencies(request), self._began_at)
        accepted: Accepted | None = None
        async for event in stream:
            if isinstance(event, Tokens):
                clock.tick()
                parts.append(event)
            elif isinstance(event, Accepted):
                accepted = event
            else:
                assert accepted is not None
                return Completion.of(accepted.request_id, accepted.model, parts, event)
        raise _cut_short()

    async def _stream(
        self,
        request: ParsedRequest,
        tokenizer: Tokenizer | None,
        output_parser: ChatOutputParser | None,
    ) -> None:
        """The answer as server-sent events.

        The status waits for all choices to be admitted and the first to say something, so that a
        refusal is a status and not an event.
        """
        accepted = await _all([_accepted(stream) for stream in self._streams])
        head = response_rendering.ResponseHead(request, accepted[0].model, int(time.time()))
        prompts = await render_prompts(request, tokenizer)
        parsers = _parsers(request, prompts, output_parser)
        chunks = [
            response_rendering.ChunkRenderer(
                head,
                index,
                one.prompt_tokens,
                prompts[index // request.n],
                parsers[index] if parsers else None,
            )
            for index, one in enumerate(accepted)
        ]
        # Each a task: a token resumes its choice, and not all that waits for that one's end.
        finished = await _all(
            [
                asyncio.create_task(self._choice(stream, chunks[index]))
                for index, stream in enumerate(self._streams)
            ]
        )
        end = response_rendering.DONE
        if request.include_usage:
            end = (
                response_rendering.usage_chunk(head, [one.usage for one in finished], parsers) + end
            )
        await self._write(end)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _choice(
        self, stream: TokenStream, chunks: response_rendering.ChunkRenderer
    ) -> Finished:
        """Sends a choice's chunks, one per delta; the last one says how it ended."""
        clock = _Clock(self._latencies(chunks.request), self._began_at)
        while events := await stream.read():
            parts: list[bytes] = []
            tokens: Tokens | None = None
            finished: Finished | None = None
            for event in events:
                if isinstance(event, Tokens):
                    clock.tick()
                    if tokens is not None:
                        parts.append(chunks.render(tokens, None))
                    tokens = event
                elif isinstance(event, Finished):
                    finished = event
            # The end comes together with the last tokens.
            parts.append(chunks.render(tokens, finished))
            body = b"".join(parts)
            if not body:
                continue
            if self._started:
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
            else:
                await self._write(body)
            if finished is not None:
                return finished
        raise _cut_short()

    def _latencies(self, request: ParsedRequest) -> RouteStats:
        return self._to.stats.latencies[self._to.route, request.lane]

    async def _write(self, chunk: bytes) -> None:
        if not self._started:
            await self._start(200, _SSE)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        cell = self._cell
        if status == 200 and cell is not None and not self._to.cells.is_unreachable(cell):
            cell.outage.served()
        own = (b"x-request-id", self._id.encode("latin-1", "replace"))
        await self._send(
            {"type": "http.response.start", "status": status, "headers": [*headers, own]}
        )

    async def _answer(
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
        if not self._started:
            headers = [_JSON, *problem.headers()]
            if problem.status not in body_reader.UNREAD_BODY_STATUSES:
                await self._answer(problem.status, headers, problem.body())
                return
            headers.append((b"connection", b"close"))
            await self._answer(problem.status, headers, problem.body(), last=False)
            await body_reader.discard_body(self._receive)
            await self._send({"type": "http.response.body", "body": b""})
            return
        event = b"data: " + problem.body() + b"\n\n" + response_rendering.DONE
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    def _too_many(self) -> HttpError:
        limit = self._to.config.max_running_requests
        return HttpError(
            429,
            f"{limit} requests are running on this gateway, its limit",
            kind="rate_limit_error",
            code="gateway_full",
            retry_after_s=1.0,
        )


class _Clock:
    """When a choice's deltas came."""

    __slots__ = ("_last_at", "_stats", "_ticked")

    def __init__(self, stats: RouteStats, began_at: float) -> None:
        self._stats, self._last_at, self._ticked = stats, began_at, False

    def tick(self) -> None:
        now = time.monotonic()
        histogram = self._stats.itl if self._ticked else self._stats.ttft
        histogram.observe(now - self._last_at)
        self._last_at, self._ticked = now, True


def _parsers(
    request: ParsedRequest,
    prompts: Sequence[RenderedPrompt],
    output_parser: ChatOutputParser | None,
) -> list[ChoiceOutputParser]:
    """One per choice; empty: outputs are not parsed."""
    if output_parser is None:
        return []
    token_ids = prompts[0].token_ids if output_parser.needs_prompt else ()
    return output_parser.choices(request.num_choices, token_ids)


async def _accepted(stream: TokenStream) -> Accepted:
    event = await _next(stream)
    assert isinstance(event, Accepted)
    return event


async def _next(stream: TokenStream) -> Event:
    try:
        return await anext(stream)
    except StopAsyncIteration:
        raise _cut_short() from None


async def _all(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Their results, in their order; the first that fails cancels the others."""
    if len(awaitables) == 1:
        return [await awaitables[0]]
    tasks = [asyncio.ensure_future(one) for one in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _cut_short() -> RemoteError:
    return errors.make(code_pb2.DATA_LOSS, "the stream ended without its last event")
