"""A server that only counts received bytes: how often gRPC itself copies each byte.

The transfer service needs at least these copies and one more, from the message to staging.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from baton.bench.copies import CopyCounter
from baton.runtime.network import rpc

SERVICE, METHOD = "baton.bench.Bare", "Take"
NUM_BYTES = 64 * 2**20
TIMEOUT_S = 60.0


async def received_copies(counter: CopyCounter, message_bytes: int) -> float:
    """Returns copies per byte in a receiving process, for messages of this size."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "baton.bench.bare_stream",
        env={**os.environ, **counter.environment},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            address = f"127.0.0.1:{int(await server.stdout.readline())}"
            async with rpc.channel(address, max_message_bytes=rpc.MAX_FRAME_BYTES) as channel:
                await _send(channel, message_bytes, message_bytes)
                before = counter.copied_bytes(server.pid)
                sent = await _send(channel, message_bytes, NUM_BYTES)
                return (counter.copied_bytes(server.pid) - before) / sent
    finally:
        server.kill()
        await server.wait()


async def _send(channel: grpc.aio.Channel, message_bytes: int, num_bytes: int) -> int:
    """Returns how many bytes arrived."""
    call: Any = channel.stream_unary(f"/{SERVICE}/{METHOD}")()
    for _ in range(num_bytes // message_bytes):
        await call.write(bytes(message_bytes))
    await call.done_writing()
    return int(await call)


async def _take(messages: AsyncIterator[bytes], context: object) -> bytes:
    del context
    return str(sum([len(message) async for message in messages])).encode()


async def _serve() -> None:
    server = rpc.server(max_message_bytes=rpc.MAX_FRAME_BYTES)
    handler: Any = grpc.stream_unary_rpc_method_handler(_take)
    handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
    server.add_generic_rpc_handlers((handlers,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination(TIMEOUT_S)


if __name__ == "__main__":
    asyncio.run(_serve())
