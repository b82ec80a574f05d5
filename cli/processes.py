"""`baton up`, `baton coordinator`, `baton worker`: the processes themselves."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli import options

if TYPE_CHECKING:
    from baton.runtime.config import BatonConfig


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


Listen = Annotated[
    str | None,
    typer.Option("--listen", metavar="HOST:PORT", help="gRPC; port 0 picks a free one."),
]


def up(
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    listen: Listen = None,
    prefill: Annotated[
        int | None, typer.Option("--prefill", min=0, help="Prefill workers.")
    ] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=0, help="Decode workers.")] = None,
    engine_arg: options.EngineArgs = None,
    log_level: options.Level = None,
) -> None:
    """Run a coordinator and its workers in the foreground; Ctrl-C drains.

    Prints `ready grpc=HOST:PORT` on standard output once it serves.
    """
    _serve_coordinator(
        options.load_config(
            config,
            model=model,
            served_model_name=served_model_name,
            engine=engine,
            engine_args=engine_arg,
            log_level=log_level,
            listen=listen,
            num_prefill=prefill,
            num_decode=decode,
        ),
        launch=True,
    )


def coordinator(
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    listen: Listen = None,
    log_level: options.Level = None,
) -> None:
    """Run a coordinator alone; workers are started elsewhere and dial in."""
    _serve_coordinator(
        options.load_config(
            config,
            model=model,
            served_model_name=served_model_name,
            engine=engine,
            log_level=log_level,
            listen=listen,
        ),
        launch=False,
    )


def worker(
    role: Annotated[RoleName, typer.Option("--role")],
    coordinator: Annotated[str, typer.Option("--coordinator", metavar="HOST:PORT")],
    worker_id: Annotated[
        str, typer.Option("--worker-id", help="Unique in the cluster; empty: made up.")
    ] = "",
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    engine_arg: options.EngineArgs = None,
    log_level: options.Level = None,
) -> None:
    """Run one worker; SIGTERM drains it."""
    import importlib

    from baton.cli.model import prepared
    from baton.runtime import lifecycle
    from baton.runtime.config import split_address
    from baton.v1 import common_pb2

    split_address(coordinator, "--coordinator")
    effective = prepared(
        options.load_config(
            config,
            model=model,
            served_model_name=served_model_name,
            engine=engine,
            engine_args=engine_arg,
            log_level=log_level,
        )
    )
    # By name, at the last moment: the command line installs and runs where workers do not.
    worker_main = importlib.import_module("baton.worker.main")
    number = common_pb2.ROLE_PREFILL if role is RoleName.PREFILL else common_pb2.ROLE_DECODE
    code = lifecycle.run(
        worker_main.serve(effective, role=number, coordinator=coordinator, worker_id=worker_id)
    )
    raise typer.Exit(code)


# gRPC reads it when it is imported, and only then. The server's sockets are polled by the thread
# that takes what came to Python, not by a pool of threads that wake each other: that is cheaper by
# a sixth.
_GRPC_EXPERIMENTS, _POLLED_BY_ONE_THREAD = "GRPC_EXPERIMENTS", "-event_engine_listener"


def _serve_coordinator(config: BatonConfig, *, launch: bool) -> None:
    is_free = _GRPC_EXPERIMENTS not in os.environ
    if is_free:
        os.environ[_GRPC_EXPERIMENTS] = _POLLED_BY_ONE_THREAD
    from baton.cli.model import prepared
    from baton.coordinator import server
    from baton.runtime import lifecycle, logs

    if is_free:
        # The workers that are started from here move more than they poll.
        del os.environ[_GRPC_EXPERIMENTS]
    logs.setup(config.log_level, "coordinator")

    def ready(address: str) -> None:
        print(f"ready grpc={address}", flush=True)

    code = lifecycle.run(server.serve(prepared(config), launch=launch, ready=ready))
    raise typer.Exit(code)
