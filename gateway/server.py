"""The gateway's process: a client for each cell and one HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import uvicorn

from baton.client import BatonClient, Tls
from baton.client.watcher import Watcher
from baton.gateway import admin_credential
from baton.gateway.app import Gateway
from baton.gateway.batches.database import Database
from baton.gateway.cell import Cell, OutputParsersFactory
from baton.gateway.cells import Cells
from baton.gateway.connections import protocol_factory
from baton.gateway.coordinator_queries import QueryLimiter
from baton.runtime.config import HttpConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.process import logs
from baton.runtime.process.lifecycle import draining, frozen_heap, stop_requested
from baton.runtime.process.long_tasks import log_failure
from baton.runtime.process.open_files import connection_limit, open_file_limit
from baton.runtime.security.security_config import SecurityConfig
from baton.runtime.security.tls import CONFIG_KEYS, Handshakes, TlsFiles

_log = logging.getLogger(__name__)

# Least limit of requests in a gateway's session: the coordinator's default limit. A gateway with a
# high http.max_running_requests has a higher limit.
_MIN_STREAMS = 4096
# Time for clients to read the error after the drain timeout ended their requests.
_CLOSE_GRACE_S = 2.0


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers, which the process installs itself.

    Args:
        config: uvicorn's configuration.
        ready: Called once when connections are accepted.
        tls: TLS context; None: no TLS.
        handshake_timeout_s: Timeout of TLS handshakes.
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
        # Listeners are opened here: uvicorn has no option for the TLS handshake timeout (60 s).
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
    """Sends uvicorn's log lines to the same place as Baton's."""
    # uvicorn's warnings are about malformed requests, which the gateway counts as refusals.
    logs.adopt("uvicorn", logging.ERROR)
    # Its warnings are about malformed uploads, which are answered with an error.
    logs.adopt("python_multipart", logging.ERROR)


@dataclass(frozen=True, slots=True)
class CellEndpoints:
    """The addresses of a cell's coordinators, and its output parsers.

    Attributes:
        coordinators: host:port of each coordinator; one of them serves at a time.
        parsers: Makes the parsers of chat outputs; None: outputs are not parsed.
    """

    coordinators: Sequence[str]
    parsers: OutputParsersFactory | None = None


async def serve(
    config: HttpConfig,
    cell_endpoints: Sequence[CellEndpoints],
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    resume_timeout_s: float,
    stop: asyncio.Event | None = None,
    security: SecurityConfig | None = None,
    clock: Callable[[], float] = time.time,
) -> int:
    """Serves until `stop` is set, then drains for at most `config.drain_timeout_s`.

    Args:
        config: Limits of requests and connections.
        cell_endpoints: The cells behind the gateway; at least one.
        listener: Bound socket.
        ready: Called once when connections are accepted.
        resume_timeout_s: Longest wait of a running request for a coordinator, after it has lost its
            own.
        stop: Set it to stop the gateway; None: SIGINT and SIGTERM stop it.
        security: TLS towards clients and coordinators, and access to metrics; None: the defaults.
        clock: Returns Unix time in seconds, for files and batches.

    Returns:
        The exit code: 0 after a requested stop.

    Raises:
        ConfigError: A file of `security` or the directory of `config.batches` cannot be used.
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
    config = _with_possible_connections(config)
    stop = stop if stop is not None else stop_requested()
    query_limiter = QueryLimiter()
    # The modules imported here belong to the frozen heap.
    database = await _open_database(config)
    async with frozen_heap(), contextlib.AsyncExitStack() as stack:
        if database is not None:
            stack.callback(database.close)
        cells = Cells()
        has_others = len(cell_endpoints) > 1
        max_streams = max(_MIN_STREAMS, 2 * config.max_running_requests)
        for endpoints in cell_endpoints:
            cells.add(
                await _open(
                    endpoints,
                    cells,
                    has_others,
                    max_streams,
                    resume_timeout_s,
                    tls,
                    query_limiter,
                    stack,
                )
            )
        await stack.enter_async_context(cells)
        gateway = Gateway(cells, query_limiter, config, security, database, clock)
        if gateway.batches is not None:
            await stack.enter_async_context(gateway.batches)
        if gateway.pooling is not None:
            await stack.enter_async_context(gateway.pooling)
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
        ending = asyncio.create_task(
            _end_in_time(stop, gateway, cells, config.drain_timeout_s), name="end of requests"
        )
        ending.add_done_callback(log_failure)
        # An operator who has given a wrong address learns of it before the first request.
        reports = [
            asyncio.create_task(cell.report_unreachable(), name=f"first call of {cell.name}")
            for cell in cells
        ]
        for report in reports:
            report.add_done_callback(log_failure)
        try:
            # Shutdown: 1. No new connections; idle connections close. 2. Running requests end, or
            # _end_in_time ends them after the drain timeout. 3. The clients' sessions close.
            await server.run_until(stop, listener)
        finally:
            for task in (ending, *reports):
                task.cancel()
            await asyncio.gather(ending, *reports, return_exceptions=True)
    return 0


def _with_possible_connections(config: HttpConfig) -> HttpConfig:
    """Lowers http.max_connections to what the limit of open files allows."""
    possible = connection_limit(config.max_connections)
    if possible < config.max_connections:
        _log.warning(
            "http.max_connections is %d, but this process may open only %d files (RLIMIT_NOFILE): "
            "at most %d connections; raise the limit with `ulimit -n` or LimitNOFILE=",
            *(config.max_connections, open_file_limit(), possible),
        )
    return config.model_copy(update={"max_connections": possible})


async def _open_database(config: HttpConfig) -> Database | None:
    """Opens the database of files and batches; None if there are none."""
    directory = config.batches.dir
    if not directory:
        return None
    missing = [name for name in ("openai", "python_multipart") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"http.batches.dir: needs {' and '.join(missing)} (install baton[http])")
    await asyncio.to_thread(import_module, "baton.gateway.batches.routes")
    return await asyncio.to_thread(Database, directory)


async def _open(
    endpoints: CellEndpoints,
    cells: Cells,
    has_others: bool,
    max_streams: int,
    resume_timeout_s: float,
    tls: Tls | None,
    query_limiter: QueryLimiter,
    stack: contextlib.AsyncExitStack,
) -> Cell:
    """Opens the clients of a cell; the stack closes them. The caller adds the cell to `cells`."""

    def find_other_cell(model: str) -> BatonClient | None:
        cells.report_lost(cell)
        return cells.other_client(cell, model)

    client = BatonClient(
        endpoints.coordinators,
        max_requests=max_streams,
        resume_timeout_s=resume_timeout_s,
        tls=tls,
        find_other_cell=find_other_cell if has_others else None,
    )
    watcher = Watcher(endpoints.coordinators, tls=tls, api_key=admin_credential.current_credential)
    cell = Cell(
        await stack.enter_async_context(client),
        await stack.enter_async_context(watcher),
        query_limiter,
        endpoints.parsers,
    )
    return cell


async def _end_in_time(
    stop: asyncio.Event, gateway: Gateway, cells: Cells, drain_timeout_s: float
) -> None:
    """Ends the requests that still run drain_timeout_s after a stop."""
    await stop.wait()
    if gateway.num_running:
        _log.info(draining(gateway.num_running, drain_timeout_s))
    await asyncio.sleep(drain_timeout_s)
    _log.warning("drain timeout of %g s is over: ending the running requests", drain_timeout_s)
    why = f"the gateway stopped; its drain timeout of {drain_timeout_s:g} s was over"
    if gateway.batches is not None:
        # First, because a closed client would fail the lines.
        await gateway.batches.stop()
    await asyncio.gather(*(cell.client.aclose(why) for cell in cells))
