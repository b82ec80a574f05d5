"""`baton up`: runs a whole cell, with a coordinator, its workers and the HTTP gateway."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Annotated, Any

import psutil
import typer

from baton.cli import gateway, options
from baton.cli.demo_models import with_demo_model
from baton.cli.effective_config import load_config
from baton.coordinator.server import server
from baton.runtime.config import BatonConfig, HttpConfig, exposure
from baton.runtime.network.addresses import joined, split_address
from baton.runtime.process import lifecycle, logs, output_streams
from baton.runtime.process.lifecycle import stop_requested

_BETWEEN_SIGNALS_S = 0.2


def up(
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    listen: options.Listen = None,
    prefill: Annotated[
        int | None, typer.Option("--prefill", min=0, help="Number of prefill workers.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option("--decode", min=0, help="Number of decode workers.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=options.MOST,
            help="Number of workers of an elastic cell, in which every worker computes prompts and "
            "decodes; replaces --prefill and --decode.",
        ),
    ] = None,
    elastic: Annotated[
        bool | None,
        typer.Option(
            "--elastic/--no-elastic",
            help="Let every worker compute prompts and decode, or give each pool its own work.",
        ),
    ] = None,
    autoscale: Annotated[
        bool | None,
        typer.Option(
            "--autoscale/--no-autoscale",
            help="Let the coordinator change the pool sizes with the load.",
        ),
    ] = None,
    engine_arg: options.EngineArgs = None,
    tool_call_parser: options.ToolCallParser = None,
    reasoning_parser: options.ReasoningParser = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            "--http-port", min=0, max=65535, help="Port of the HTTP gateway; 0 picks a free port."
        ),
    ] = None,
    no_http: Annotated[
        bool, typer.Option("--no-http", help="Run without the HTTP gateway.")
    ] = False,
    launcher: Annotated[
        options.LauncherName | None,
        typer.Option(
            "--launcher", help="Start the workers on this host (local, the default) or through Ray."
        ),
    ] = None,
    log_level: options.Level = None,
) -> None:
    """Run a whole cell in the foreground; Ctrl-C drains it.

    The cell is a coordinator, its workers and the HTTP gateway. The command prints `ready
    grpc=HOST:PORT http=URL` on standard output once the cell serves.
    """
    prefill, decode = options.split_workers(workers, prefill, decode)
    if workers is not None and elastic is False:
        raise typer.BadParameter("cannot be used with --no-elastic", param_hint="--workers")
    effective = load_config(
        config,
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        engine_args=engine_arg,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        log_level=log_level,
        listen=listen,
        num_prefill=prefill,
        num_decode=decode,
        elastic=True if workers is not None else elastic,
        autoscale=autoscale,
        http_listen="" if no_http else None,
        launcher=launcher,
    )
    if http_port is not None and not no_http:
        effective = _with_http_port(effective, http_port)
    logs.setup(effective.log_level, "coordinator")
    raise typer.Exit(lifecycle.run(_up(with_demo_model(effective))))


async def _up(config: BatonConfig) -> int:
    """Runs the coordinator in this process, and workers and gateway in child processes."""
    stop, end = stop_requested(_end_at_once), asyncio.Event()
    listener, url = None, ""
    if config.http.listen:
        # Errors of the gateway's settings are found before workers load their model for minutes.
        gateway.check_installed()
        # In a thread, because this may download the model's configuration.
        config = await asyncio.to_thread(gateway.with_parsers_of_model, config)
        exposure.check_http(config.http.listen, config.security)
        listener, url = gateway.bind(config.http.listen)
        http = config.http.model_copy(update={"listen": url.removeprefix("http://")})
        config = config.model_copy(update={"http": http})
        url = gateway.served_url(url, config)
    address, ready = asyncio.get_running_loop().create_future(), asyncio.Event()
    serving = asyncio.create_task(
        server.serve(
            config,
            launch=True,
            listening=address.set_result,
            ready=lambda _: ready.set(),
            stop=end,
        )
    )
    stopping = asyncio.create_task(stop.wait())
    waiting: set[asyncio.Future[Any]] = {serving, stopping}
    starting: set[asyncio.Future[Any]] = {asyncio.create_task(ready.wait())}
    process = None
    try:
        await asyncio.wait({*waiting, address}, return_when=asyncio.FIRST_COMPLETED)
        if listener is not None and address.done():
            # The gateway starts while the workers load, because it may be slow or fail too.
            process = gateway.GatewayProcess(config, address.result(), listener)
            starting.add(asyncio.create_task(process.start(), name="start of the gateway"))
        while starting and not (serving.done() or stop.is_set()):
            begun, _ = await asyncio.wait(
                {*waiting, *starting}, return_when=asyncio.FIRST_COMPLETED
            )
            for one in begun & starting:
                one.result()
            starting -= begun
        if not starting:
            served = f" http={url}" if process is not None else ""
            output_streams.stdout.write(f"ready grpc={address.result()}{served}\n")
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # 1. The gateway stops accepting requests and finishes the running ones.
        # 2. The coordinator drains and its workers exit.
        for one in starting:
            one.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        if process is not None:
            await process.stop()
        elif listener is not None:
            listener.close()
        stopping.cancel()
        end.set()
        code = await serving
    return code


def _end_at_once() -> None:
    """Makes workers and gateway end at once instead of draining.

    A process ends at once when it gets SIGTERM twice. This function sends the first one; the kernel
    sends the second one when this process ends (launchers/end_with_parent.py).
    """
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.terminate()
    # Two pending signals of the same kind are delivered as one, so the second one must come later.
    time.sleep(_BETWEEN_SIGNALS_S)


def _with_http_port(config: BatonConfig, port: int) -> BatonConfig:

    listen = config.http.listen or HttpConfig().listen
    host, _ = split_address(listen, "http.listen")
    http = config.http.model_copy(update={"listen": joined(host.strip("[]"), port)})
    return config.model_copy(update={"http": http})
