"""`baton worker`: runs one worker."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.demo_models import with_demo_model
from baton.cli.effective_config import load_config
from baton.runtime.config_error import ConfigError
from baton.runtime.names import WORKER_NAMES, is_worker
from baton.runtime.network.addresses import split_address
from baton.v1 import common_pb2
from baton.worker import main as worker_main


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def worker(
    role: Annotated[RoleName, typer.Option("--role", help="Pool that the worker joins at first.")],
    coordinator: Annotated[
        str, typer.Option("--coordinator", metavar="HOST:PORT", help="Address of the coordinator.")
    ],
    worker_id: Annotated[
        str,
        typer.Option(
            "--worker-id", help="ID of the worker, unique in the cell; empty: the worker makes one."
        ),
    ] = "",
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    engine_arg: options.EngineArgs = None,
    revision: Annotated[
        str | None,
        typer.Option(
            "--revision",
            metavar="NAME",
            help="Revision (model and engine arguments) of the worker; see `baton rollout`.",
        ),
    ] = None,
    log_level: options.Level = None,
    directory: Annotated[
        str,
        typer.Option(
            "--directory", hidden=True, help="Directory of the worker's sockets; empty: a new one."
        ),
    ] = "",
) -> None:
    """Run one worker; SIGTERM drains it."""
    split_address(coordinator, "--coordinator")
    if worker_id and not is_worker(worker_id):
        raise ConfigError(f"--worker-id: is {worker_id!r}; must be {WORKER_NAMES}")
    effective = with_demo_model(
        load_config(
            config,
            model=model,
            served_model_name=served_model_name,
            engine=engine,
            engine_args=engine_arg,
            revision=revision,
            log_level=log_level,
        )
    )
    number = common_pb2.ROLE_PREFILL if role is RoleName.PREFILL else common_pb2.ROLE_DECODE
    raise typer.Exit(worker_main.main(effective, number, coordinator, worker_id, directory))
