"""What gRPC itself costs a coordinator: a process that passes on what it reads, unread.

`python -m baton.bench.bare_relay HOST:PORT`. It has a coordinator's streams, and reads and writes
them as it does: a task reads each and another writes it, and what comes while a message is being
written leaves as one. What the client submits goes to a prefill worker; what that answers goes to
the client, and to the decode worker, which begins with it; what this answers goes to the client.
So there are as many messages as with a coordinator, of about the same length, and nothing is
parsed, checked, counted or decided. The workers are in relay_worker.py.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import Any

import grpc

from baton.bench.cost_answers import BATCH_TAG, prefix
from baton.runtime import lifecycle, rpc

SERVICE, PREFILL, DECODE = "baton.bench.Relay", "Prefill", "Decode"
_INFERENCE, _SESSION = "baton.v1.Inference", "Session"
# Where goes what comes from each. Who is not there is not told: one token needs no decode worker.
_ROUTES = {_SESSION: (PREFILL,), PREFILL: (_SESSION, DECODE), DECODE: (_SESSION,)}


class _Outbox:
    """What waits to be written to one stream.

    Args:
        tag: of the repeated field that each becomes an entry of; empty: they are joined as they
            are, which merges messages that have nothing but repeated fields.
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
        """One of the streams, until its other end closes it."""
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
    """Until it is killed."""
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
