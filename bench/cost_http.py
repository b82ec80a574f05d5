"""The HTTP client of gateway_cost.py."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from urllib.parse import urlsplit

from baton.bench.cost_client import Seen, traceparent

_TOKEN, _END = b" tok", b"0\r\n\r\n"


class HttpClient:
    """Requests completions over one kept-alive connection per slot; checks the token count.

    Args:
        url: URL of the gateway.
        num_prompt_tokens: Prompt tokens of each request.
        num_tokens: Output tokens of each request.
        tls: None: no TLS.
        traced: Whether the requests carry a traceparent.
    """

    def __init__(
        self,
        url: str,
        num_prompt_tokens: int,
        num_tokens: int,
        tls: ssl.SSLContext | None = None,
        *,
        traced: bool = False,
    ) -> None:
        self.seen, self._tls, self._traced = Seen(), tls, traced
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
        tail = b""
        while not tail.endswith(_END):
            data = await reader.read(2**16)
            if not data:
                raise ConnectionError(f"closed after {num_tokens} tokens: {tail!r}")
            # A read may split the text of a token or the end marker, so the tail is kept.
            found = (tail + data).count(_TOKEN) - tail.count(_TOKEN)
            tail = (tail + data)[-8:]
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
        prompt = [(slot * 31 + index * 17) % 50_000 for index in range(self._num_prompt_tokens)]
        body = json.dumps(
            {
                "prompt": prompt,
                "max_tokens": self._num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._address.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        )
        if self._traced:
            head += f"traceparent: {traceparent(slot)}\r\n"
        return f"{head}\r\n{body}".encode()
