"""Clients that keep thousands of streams open, over HTTP and over one gRPC session.

Every stream is compared with the output that the simulated engine must give for its prompt.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from baton.client import BatonClient, Tokens
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.load import stats
from baton.runtime.errors import RemoteError

_EVENT, _DONE, _LAST_CHUNK = b"data: {", b"data: [DONE]", b"0\r"


@dataclass(slots=True)
class Gaps:
    """Times between two events of a stream, over all streams, in seconds.

    The gap after the first token is left out, because the handoff is a part of it.
    """

    _ended_at: array[float] = field(default_factory=lambda: array("d"))
    _gaps_s: array[float] = field(default_factory=lambda: array("d"))

    def add(self, ended_at: float, gap_s: float) -> None:
        self._ended_at.append(ended_at)
        self._gaps_s.append(gap_s)

    def within(self, since: float, until: float) -> Sequence[float]:
        """Returns the gaps that ended in a period of time.perf_counter."""
        pairs = zip(self._ended_at, self._gaps_s, strict=True)
        return [gap_s for ended_at, gap_s in pairs if since <= ended_at < until]


@dataclass(frozen=True, slots=True)
class Output:
    """The tokens that a stream must have: the completion of a prompt."""

    prompt: Sequence[int]
    num_tokens: int

    def text(self, vocabulary: Vocabulary) -> str:
        token_ids = expected_tokens(vocabulary, self.prompt, self.num_tokens)
        return str(vocabulary.tokenizer.decode(token_ids))


class Stream:
    """One stream as its client sees it.

    Attributes:
        num_events: Events with tokens so far.
        begun: Done at the first event, or at the end of the stream.
        decodes: Done at the second event, which a decode worker sends, or at the end.
        ended: Done at the end of the stream.
        error: Why the stream ended early; empty: it has its last event.
    """

    def __init__(self, output: Output, gaps: Gaps) -> None:
        self._output, self._gaps = output, gaps
        self._texts: list[str] = []
        self._last_at = 0.0
        self.num_events = 0
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.decodes: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.error = ""

    @property
    def is_open(self) -> bool:
        return self.begun.done() and not self.ended.done()

    def add(self, text: str) -> None:
        now = time.perf_counter()
        if self.num_events > 1:
            self._gaps.add(now, now - self._last_at)
        else:
            (self.decodes if self.num_events else self.begun).set_result(None)
        self._last_at = now
        self.num_events += 1
        self._texts.append(text)

    def end(self, error: str) -> None:
        if not self.ended.done():
            self.error = error
            self.ended.set_result(None)
        for event in (self.begun, self.decodes):
            if not event.done():
                event.set_result(None)

    def is_right(self, vocabulary: Vocabulary) -> bool:
        """Whether the text is the expected one, or begins the expected one after an early end."""
        text, expected = "".join(self._texts), self._output.text(vocabulary)
        return expected.startswith(text) if self.error else text == expected


class _HttpStream(asyncio.Protocol):
    """Reads the server-sent events of one completion and closes the connection."""

    def __init__(self, request: bytes, stream: Stream) -> None:
        self._request, self._stream = request, stream
        self._rest, self._status, self._error = b"", b"", ""
        self._is_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_EVENT):
                self._take(json.loads(line[len(_EVENT) - 1 :]))
            elif line.startswith(_DONE):
                self._is_done = True
            elif line == _LAST_CHUNK and self._is_done:
                self._stream.end(self._error)
                self._transport.close()
            elif not self._status:
                self._status = line.rstrip()

    def connection_lost(self, exc: Exception | None) -> None:
        ended = f"connection error: {exc}" if exc else "connection error: closed before the end"
        if self._status and b" 200 " not in self._status:
            ended = f"{self._status.decode()}: {self._rest.decode(errors='replace')}"
        self._stream.end(ended)

    def _take(self, event: dict[str, object]) -> None:
        choices = event.get("choices")
        if isinstance(choices, list):
            self._stream.add(choices[0]["text"])
        else:
            self._error = f"error event: {event}"


async def open_http(url: str, output: Output, gaps: Gaps) -> Stream:
    """Requests a streamed completion; returns when the first token has arrived."""
    stream, address = Stream(output, gaps), urlsplit(url)
    body = json.dumps(
        {
            "prompt": list(output.prompt),
            "max_tokens": output.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    )
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    host, port = address.hostname or "", address.port or 80
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: _HttpStream((head + body).encode(), stream), host, port
        )
    except OSError as error:
        stream.end(f"cannot connect: {error}")
    await stream.begun
    return stream


async def read_grpc(client: BatonClient, stream: Stream, output: Output) -> None:
    """Reads a completion over the client's session to its end."""
    try:
        async for event in client.generate(
            output.prompt, max_tokens=output.num_tokens, temperature=0, ignore_eos=True
        ):
            if isinstance(event, Tokens):
                stream.add(event.text)
        stream.end("")
    except RemoteError as error:
        stream.end(str(error))


@dataclass(frozen=True, slots=True)
class GapFigures:
    """Gaps of the streams of one kind in one period.

    Attributes:
        num_gaps: Number of gaps.
        p50_ms, p99_ms, longest_ms: In milliseconds.
    """

    num_gaps: int
    p50_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, gaps: Gaps, since: float, until: float) -> GapFigures:
        found = gaps.within(since, until)
        p50, p99, longest = (stats.percentile(found, percent) * 1e3 for percent in (50, 99, 100))
        return cls(len(found), p50, p99, longest)
