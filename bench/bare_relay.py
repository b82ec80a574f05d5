"""A process that forwards messages without parsing them: the cost of gRPC alone in a coordinator.

`python -m baton.bench.bare_relay HOST:PORT`. The relay has the same streams as a coordinator and
uses them in the same way: one task reads each stream, another task writes it, and messages that
arrive during a write are sent together as one. The relay forwards submissions of the client to a
prefill worker. It forwards the prefill worker's answers to the client and to the decode worker,
which then starts, and the decode worker's answers to the client. The number and the length of the
messages are about the same as with a coordinator, but the relay parses, checks, counts and decides
nothing. The workers are in relay_worker.py.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import grpc

from baton.bench.cost_answers import BATCH_TAG, prefix
from baton.runtime.network import rpc
from baton.runtime.process import lifecycle

SERVICE, PREFILL, DECODE = "baton.bench.Relay", "Prefill", "Decode"
_INFERENCE, _SESSION = "baton.v1.Inference", "Session"
# Receivers of the messages of each stream. A receiver that is not connected is skipped: requests
# with one output token need no decode worker.
_ROUTES = {_SESSION: (PREFILL,), PREFILL: (_SESSION, DECODE), DECODE: (_SESSION,)}


class _Outbox:
    """Messages that wait to be written to one stream.

    Args:
        tag: Each message becomes an entry of the repeated field with this tag. Empty: messages are
            concatenated, which merges messages that have only repeated fields.
    """

    def __init__(self, tag: bytes) -> None:
        self._tag = tag
        self._waiting: list[bytes] = []
        self._posted = asyncio.Event()

    def push(self, message: bytes) -> None:
        if self._tag:
            self._waiting.append(prefix(self._tag, len(message)))
        self._waiting.append(message)
        self._posted.set()

    async def write(self, context: Any) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            joined = b"".join(self._waiting)
            self._waiting.clear()
            await context.write(joined)


class Relay:
    """One client, one prefill worker and one decode worker at a time."""

    def __init__(self) -> None:
        self._outboxes: dict[str, _Outbox] = {}

    async def serve(self, name: str, request_iterator: object, context: Any) -> None:
        """Serves one of the streams until the other end closes it."""
        del request_iterator
        outbox = self._outboxes[name] = _Outbox(BATCH_TAG if name == PREFILL else b"")
        await context.send_initial_metadata(())
        writer = asyncio.create_task(outbox.write(context))
        try:
            while isinstance(message := await context.read(), bytes):
                for other in _ROUTES[name]:
                    if (to := self._outboxes.get(other)) is not None:
                        to.push(message)
        finally:
            if self._outboxes.get(name) is outbox:
                del self._outboxes[name]
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)


async def serve(listen: str) -> int:
    """Serves until the process is killed."""
    relay, server = Relay(), rpc.server()
    for service, names in ((_INFERENCE, (_SESSION,)), (SERVICE, (PREFILL, DECODE))):
        handlers: dict[str, Any] = {
            name: grpc.stream_stream_rpc_method_handler(partial(relay.serve, name))
            for name in names
        }
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    rpc.bind(server, listen, "HOST:PORT")
    await server.start()
    print("ready", flush=True)
    try:
        await server.wait_for_termination()
    finally:
        await server.stop(None)
    return 0


if __name__ == "__main__":
    lifecycle.run(serve(sys.argv[1]))
