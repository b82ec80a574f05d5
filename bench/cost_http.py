"""The HTTP client of gateway_cost.py."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Seen, traceparent

_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class HttpRoute:
    """A route of the gateway.

    Attributes:
        path: Path of the route.
        token: Bytes that a stream has once per token.
        limit: Name of the field with the number of output tokens.
        fields: Fields of the body with a text as prompt; None: the prompt is token IDs.
    """

    path: str
    token: bytes
    limit: str
    fields: dict[str, Any] | None = None


_TEXT = "What does the gateway cost?"
COMPLETIONS = HttpRoute("/v1/completions", b'" tok"', "max_tokens")
MESSAGES = HttpRoute(
    "/v1/messages",
    b'"text_delta"',
    "max_tokens",
    {"model": MODEL, "messages": [{"role": "user", "content": _TEXT}]},
)
RESPONSES = HttpRoute(
    "/v1/responses",
    b"event: response.output_text.delta",
    "max_output_tokens",
    {"model": MODEL, "input": _TEXT, "store": False},
)
TOOLS = HttpRoute(
    "/v1/chat/completions",
    b'"content":" tok"',
    "max_tokens",
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": _TEXT}],
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
        "ignore_eos": True,
    },
)


class HttpClient:
    """Requests completions over one kept-alive connection per slot; checks the token count.

    Args:
        url: URL of the gateway.
        num_prompt_tokens: Prompt tokens of each request, if the route takes token IDs.
        num_tokens: Output tokens of each request.
        tls: None: no TLS.
        route: Route of the requests.
        traced: Whether the requests carry a traceparent.
    """

    def __init__(
        self,
        url: str,
        num_prompt_tokens: int,
        num_tokens: int,
        tls: ssl.SSLContext | None = None,
        *,
        route: HttpRoute = COMPLETIONS,
        traced: bool = False,
    ) -> None:
        self.seen, self._route, self._tls, self._traced = Seen(), route, tls, traced
        self._address = urlsplit(url)
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, num_tokens
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def request(self, slot: int) -> None:
        if slot not in self._connections:
            self._connections[slot] = await asyncio.open_connection(
                self._address.hostname, self._address.port, ssl=self._tls
            )
        reader, writer = self._connections[slot]
        num_tokens, last_at = 0, time.perf_counter()
        writer.write(self._request(slot))
        tail, token = b"", self._route.token
        while not tail.endswith(_END):
            data = await reader.read(2**16)
            if not data:
                raise ConnectionError(f"closed after {num_tokens} tokens: {tail!r}")
            # A read may split the text of a token or the end marker, so the tail is kept.
            found = (tail + data).count(token) - tail.count(token)
            tail = (tail + data)[-max(len(token), len(_END)) :]
            if not found:
                continue
            now = time.perf_counter()
            (self.seen.gaps_s if num_tokens else self.seen.ttfts_s).append(now - last_at)
            num_tokens, last_at = num_tokens + found, now
            self.seen.num_tokens += found
        if num_tokens != self._num_tokens:
            raise RuntimeError(f"{num_tokens} of {self._num_tokens} tokens")
        self.seen.num_requests += 1

    async def close(self) -> None:
        for _, writer in self._connections.values():
            writer.close()

    def _request(self, slot: int) -> bytes:
        fields = self._route.fields
        if fields is None:
            prompt = [(slot * 31 + index * 17) % 50_000 for index in range(self._num_prompt_tokens)]
            fields = {"prompt": prompt, "ignore_eos": True}
        rest = {self._route.limit: self._num_tokens, "temperature": 0, "stream": True}
        body = json.dumps({**fields, **rest})
        head = (
            f"POST {self._route.path} HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        if self._traced:
            head += f"traceparent: {traceparent(slot)}\r\n"
        return f"{head}\r\n{body}".encode()
