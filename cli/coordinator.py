"""`baton coordinator`: runs a coordinator alone."""

from __future__ import annotations

import typer

from baton.cli import options
from baton.cli.demo_models import with_demo_model
from baton.cli.effective_config import load_config
from baton.coordinator.server import server
from baton.runtime.process import lifecycle, logs, output_streams


def coordinator(
    config: options.ConfigFile = None,
    model: options.Model = None,
    served_model_name: options.ServedModelName = None,
    engine: options.Engine = None,
    listen: options.Listen = None,
    log_level: options.Level = None,
) -> None:
    """Run a coordinator alone.

    Its workers are started elsewhere with `baton worker`.
    """
    effective = load_config(
        config,
        model=model,
        served_model_name=served_model_name,
        engine=engine,
        log_level=log_level,
        listen=listen,
    )
    logs.setup(effective.log_level, "coordinator")

    def ready(address: str) -> None:
        output_streams.stdout.write(f"ready grpc={address}\n")

    code = lifecycle.run(server.serve(with_demo_model(effective), launch=False, ready=ready))
    raise typer.Exit(code)
