"""Accepts spans like an OpenTelemetry collector and discards them.

`python -m baton.bench.otlp_sink` serves until the process is killed.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from baton.bench.systems import free_port
from baton.runtime.network import rpc
from baton.runtime.process import lifecycle

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


async def _export(request: bytes, context: Any) -> bytes:
    # An empty response means that all spans were accepted.
    return b""


async def serve() -> int:
    server = rpc.server()
    handlers: dict[str, Any] = {"Export": grpc.unary_unary_rpc_method_handler(_export)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    address = rpc.bind(server, f"127.0.0.1:{free_port()}", "listen")
    await server.start()
    print(f"ready {address}", flush=True)
    await asyncio.Event().wait()
    return 0


if __name__ == "__main__":
    lifecycle.run(serve())
