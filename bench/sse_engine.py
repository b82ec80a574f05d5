"""A server that streams prepared completions: the engine behind front ends of other projects.

`python -m baton.bench.sse_engine --help`. It answers the routes that routers ask of a vLLM or
SGLang server. A prefill server ends each request with its first token. Each step writes one token
to every stream, like the scripted workers of the cost benchmarks (cost_worker.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any, cast

from baton.bench.cost_answers import MODEL
from baton.runtime.process import lifecycle

_LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_GENERATES = ("/v1/completions", "/generate")
_SERVER: dict[str, Any] = {
    "model_path": MODEL,
    "served_model_name": MODEL,
    "model_id": MODEL,
    "tokenizer_path": MODEL,
    "is_generation": True,
    "tp_size": 1,
    "dp_size": 1,
    "version": "0.5.0",
    "max_total_num_tokens": 10**6,
}
_LOAD = [{"rid": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}]
_MODELS = {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0}]}
# Parameters that vLLM's prefill server returns for the decode server.
_TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [1, 2, 3],
    "remote_engine_id": "engine",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
}


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


def _token(reason: str | None) -> bytes:
    choice = {"index": 0, "text": " tok", "logprobs": None, "finish_reason": reason}
    fields = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": MODEL}
    return _chunk(b"data: " + json.dumps({**fields, "choices": [choice]}).encode() + b"\n\n")


_TOKEN = _token(None)
_LAST = _token("length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """Writes the tokens of all live streams, step by step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        # Remaining tokens of each stream.
        self.live: dict[asyncio.Transport, int] = {}
        self._added = asyncio.Event()

    def add(self, transport: asyncio.Transport, num_tokens: int) -> None:
        """Writes the first token; the steps write the others."""
        transport.write(_HEAD + (_TOKEN if num_tokens > 1 else _LAST))
        if num_tokens > 1:
            self.live[transport] = num_tokens - 1
            self._added.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._added.wait()
            self._added.clear()
            due = loop.time()
            while self.live:
                due = max(due + self._step_s, loop.time())
                await asyncio.sleep(due - loop.time())
                for transport, left in list(self.live.items()):
                    transport.write(_TOKEN if left > 1 else _LAST)
                    if left > 1:
                        self.live[transport] = left - 1
                    else:
                        del self.live[transport]


class Connection(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self, engine: Engine, role: str) -> None:
        self._engine, self._role, self._data = engine, role, b""
        server = {**_SERVER, "disaggregation_mode": role}
        paths = ("/get_server_info", "/server_info", "/get_model_info", "/model_info")
        self._answers: dict[str, Any] = dict.fromkeys(paths, server)
        self._answers |= {"/v1/models": _MODELS, "/get_load": _LOAD, "/v1/loads": _LOAD}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.live.pop(self._transport, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head, start = self._data[:end], end + 4
            length = _LENGTH.search(head)
            stop = start + (int(length[1]) if length is not None else 0)
            if len(self._data) < stop:
                return
            body, self._data = self._data[start:stop], self._data[stop:]
            self._answer(head.split(b" ", 2)[1].decode().partition("?")[0], body)

    def _answer(self, path: str, body: bytes) -> None:
        if path not in _GENERATES:
            # Health checks and other routes have no content.
            self._send(self._answers.get(path, {}))
            return
        fields = json.loads(body)
        num_tokens = 1 if self._role == "prefill" else int(fields["max_tokens"])
        if fields.get("stream"):
            self._engine.add(self._transport, num_tokens)
            return
        choice = {"index": 0, "text": " tok" * num_tokens, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": 2}
        head = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": MODEL}
        self._send({**head, "choices": [choice], "usage": usage, "kv_transfer_params": _TRANSFER})

    def _send(self, answer: Any) -> None:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve(arguments: argparse.Namespace) -> int:
    """Serves until the process is killed."""
    engine = Engine(arguments.step_ms / 1e3)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine, arguments.role), "127.0.0.1", arguments.port, backlog=1024
    )
    print("ready", flush=True)
    async with server:
        await engine.run()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--role", choices=("prefill", "decode"), required=True)
    parser.add_argument("--step-ms", type=float, required=True, help="time between two tokens")
    lifecycle.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
