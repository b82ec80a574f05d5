"""The gateway's process: a session with each cell's coordinator, one HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import uvicorn

from baton.client import BatonClient, Tls
from baton.client.watcher import Watcher
from baton.gateway import admin_credential
from baton.gateway.app import Gateway
from baton.gateway.cell import Cell, OutputParsersFactory
from baton.gateway.cells import Cells
from baton.gateway.connections import protocol_factory
from baton.gateway.coordinator_queries import QueryLimiter
from baton.runtime import logs
from baton.runtime.config import HttpConfig
from baton.runtime.lifecycle import settled_heap, stop_requested
from baton.runtime.security_config import SecurityConfig
from baton.runtime.tls import CONFIG_KEYS, Handshakes, TlsFiles

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
        tls: None: without.
        handshake_timeout_s: of TLS.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        ready: Callable[[], None],
        tls: ssl.SSLContext | None = None,
        handshake_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(config)
        self._ready, self._tls = ready, tls
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn would wait for a minute for the end of a handshake.
        await super().startup([])
        loop = asyncio.get_running_loop()
        for listener in sockets or ():
            server = await loop.create_server(
                self._connection,
                sock=listener,
                ssl=self._tls,
                backlog=self.config.backlog,
                ssl_handshake_timeout=self._handshake_timeout_s if self._tls is not None else None,
            )
            self.servers.append(cast("Any", server))
        self._ready()

    def _connection(self) -> asyncio.Protocol:
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=None,
        )

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


def setup_logs() -> None:
    """Of this process: uvicorn's lines go where Baton's go."""
    # Its warnings are of peers that send garbage: refusals are counted instead.
    logs.adopt("uvicorn", logging.ERROR)


@dataclass(frozen=True, slots=True)
class CellEndpoints:
    """Where a cell is.

    Attributes:
        coordinators: host:port of each; one of them serves at a time.
        parsers: makes those of its chats' outputs; None: there are none.
    """

    coordinators: Sequence[str]
    parsers: OutputParsersFactory | None = None


async def serve(
    config: HttpConfig,
    places: Sequence[CellEndpoints],
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    stop: asyncio.Event | None = None,
    security: SecurityConfig | None = None,
) -> int:
    """Serves until asked to stop; then drains, for a bounded time.

    Args:
        config: limits.
        places: of the cells; at least one.
        listener: bound.
        ready: called once when connections are accepted.
        stop: set to stop it; None for SIGINT and SIGTERM.
        security: TLS on both sides, and who may read metrics; None: as by default.

    Returns:
        The exit code: 0 after a stop that was asked for.

    Raises:
        ConfigError: a file of `security` cannot be used.
    """
    security = security or SecurityConfig()
    tls, context, handshakes = None, None, None
    files = security.ca_file, security.cert_file, security.key_file
    if security.dials_tls:
        tls = Tls(*files, security.server_name, CONFIG_KEYS)
    if security.serves_tls:
        handshakes = Handshakes("http.listen", security.handshake_timeout_s)
        context = TlsFiles(*files).server_context(
            client_auth=security.http_client_auth == "require", handshakes=handshakes
        )
    stop = stop if stop is not None else stop_requested()
    query_limiter = QueryLimiter()
    async with settled_heap(), contextlib.AsyncExitStack() as stack:
        cells = Cells()
        for place in places:
            cells.add(await _open(place, cells, len(places) > 1, tls, query_limiter, stack))
        await stack.enter_async_context(cells)
        gateway = Gateway(cells, query_limiter, config, security)
        gateway.refusals.handshakes = handshakes
        server = _Server(
            uvicorn.Config(
                gateway,
                http=cast("Any", protocol_factory(config, gateway.stats, handshakes)),
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
            context,
            security.handshake_timeout_s,
        )
        ending = asyncio.create_task(_end_in_time(stop, cells, config.drain_timeout_s))
        try:
            # 1. Nothing more is accepted, idle connections close. 2. What runs ends, or is ended
            # by _end_in_time. 3. The session closes.
            await server.run_until(stop, listener)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)
    return 0


async def _open(
    place: CellEndpoints,
    cells: Cells,
    has_others: bool,
    tls: Tls | None,
    query_limiter: QueryLimiter,
    stack: contextlib.AsyncExitStack,
) -> Cell:
    """A cell, which is to be one of `cells`; the stack closes what it needs."""

    def elsewhere(model: str) -> BatonClient | None:
        return cells.other_client(cell, model)

    client = BatonClient(
        place.coordinators,
        max_requests=_MAX_STREAMS,
        tls=tls,
        elsewhere=elsewhere if has_others else None,
    )
    watcher = Watcher(place.coordinators, tls=tls, api_key=admin_credential.current_credential)
    cell = Cell(
        await stack.enter_async_context(client),
        await stack.enter_async_context(watcher),
        query_limiter,
        place.parsers,
    )
    return cell


async def _end_in_time(stop: asyncio.Event, cells: Cells, drain_timeout_s: float) -> None:
    """Ends what does not end in time after a stop."""
    await stop.wait()
    await asyncio.sleep(drain_timeout_s)
    _log.warning("requests did not end within %g s", drain_timeout_s)
    why = f"the gateway stopped after {drain_timeout_s:g} s"
    await asyncio.gather(*(cell.client.aclose(why) for cell in cells))
