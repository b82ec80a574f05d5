"""The gateway's process: one session with a coordinator, one HTTP server."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import uvicorn

from baton.client import BatonClient
from baton.client.watcher import Watcher
from baton.gateway.app import Gateway
from baton.gateway.connections import protocol_factory
from baton.runtime.config import HttpConfig
from baton.runtime.lifecycle import stop_requested

_log = logging.getLogger(__name__)

# As many as one session may have by the coordinator's default.
_MAX_STREAMS = 4096
# After requests have been ended for lack of time: for their clients to read that.
_CLOSE_GRACE_S = 2.0


class _Server(uvicorn.Server):
    """Signals are the process's, not the server's.

    Args:
        config: of uvicorn.
        ready: called once when connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def run_until(self, stop: asyncio.Event, listener: socket.socket) -> None:
        serving = asyncio.create_task(self._serve([listener]), name="http server")
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self.should_exit = True
            await serving
        finally:
            stopping.cancel()
            serving.cancel()
            await asyncio.gather(stopping, serving, return_exceptions=True)


async def serve(
    config: HttpConfig,
    coordinators: Sequence[str],
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    stop: asyncio.Event | None = None,
) -> int:
    """Serves until asked to stop; then drains, for a bounded time.

    Args:
        config: limits.
        coordinators: host:port of each; one of them serves at a time.
        listener: bound.
        ready: called once when connections are accepted.
        stop: set to stop it; None for SIGINT and SIGTERM.

    Returns:
        The exit code: 0 after a stop that was asked for.
    """
    stop = stop if stop is not None else stop_requested()
    log = logging.getLogger("uvicorn")
    # Its warnings are of peers that send garbage: refusals are counted instead.
    log.handlers[:], log.propagate = logging.getLogger("baton").handlers, False
    log.setLevel(logging.ERROR)
    # Collections of what lives as long as the process would be pauses of its streams.
    gc.collect()
    gc.freeze()
    async with (
        BatonClient(coordinators, max_requests=_MAX_STREAMS) as client,
        Watcher(coordinators) as watcher,
    ):
        gateway = Gateway(client, watcher, config)
        server = _Server(
            uvicorn.Config(
                gateway,
                http=cast("Any", protocol_factory(config, gateway.stats)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=config.keep_alive_s,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout_s + _CLOSE_GRACE_S),
            ),
            ready,
        )
        ending = asyncio.create_task(_end_in_time(stop, client, config.drain_timeout_s))
        try:
            # 1. Nothing more is accepted, idle connections close. 2. What runs ends, or is ended
            # by _end_in_time. 3. The session closes.
            await server.run_until(stop, listener)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
    return 0


async def _end_in_time(stop: asyncio.Event, client: BatonClient, drain_timeout_s: float) -> None:
    """Ends what does not end in time after a stop."""
    await stop.wait()
    await asyncio.sleep(drain_timeout_s)
    _log.warning("requests did not end within %g s", drain_timeout_s)
    # Their answers end with an error.
    await client.aclose()
