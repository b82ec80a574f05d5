"""`baton config check|show`."""

from __future__ import annotations

from typing import Annotated

import typer

from baton.cli import options

app = typer.Typer(
    help="The configuration: check a file, show what is in force.", no_args_is_help=True
)


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML; - is standard input.")],
) -> None:
    """Say whether a file is right; an unknown key names the nearest known one."""
    from baton.runtime import exposure
    from baton.runtime.config import load, split_address

    config = load(file)
    for key, address in (
        ("coordinator.listen", config.coordinator.listen),
        ("coordinator.metrics_listen", config.coordinator.metrics_listen),
        ("worker.metrics_listen", config.worker.metrics_listen),
        ("kv_transfer.listen", config.kv_transfer.listen),
        ("http.listen", config.http.listen),
    ):
        # Only those of the transfer service and the gateway may be empty.
        if address or key not in ("kv_transfer.listen", "http.listen"):
            split_address(address, f"{file}: {key}")
    exposure.check_all(config)
    print(f"{file}: ok")


@app.command()
def show(config: options.ConfigFile = None) -> None:
    """Print the effective configuration, defaults filled in, as YAML, and without secrets."""
    from baton.runtime.config import load, shown

    print(shown(load(config)), end="")
