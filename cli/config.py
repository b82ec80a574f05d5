"""`baton config check|keys|show`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from baton.cli import options
from baton.cli.cells import configured_cells
from baton.cli.output import print_json, print_table
from baton.coordinator.state.scaling_config import check_sizes
from baton.runtime.config import BatonConfig, exposure, load, shown
from baton.runtime.config.keys import keys as known
from baton.runtime.config_error import ConfigError
from baton.runtime.names import did_you_mean
from baton.runtime.network.addresses import split_address

app = typer.Typer(
    help="Check and show the configuration, and list all keys.",
    no_args_is_help=True,
)


@app.command()
def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="YAML file; - reads standard input.")],
) -> None:
    """Check a configuration file.

    The error for an unknown key suggests the nearest known key. Files of the section security are
    checked if this user can read them.
    """
    config = load(file)
    try:
        with _warnings_collected() as warnings:
            missing = _check_as_processes_do(config)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for warning in warnings:
        typer.echo(f"baton: {file}: warning: {warning}", err=True)
    if missing:
        names = ", ".join(f"{key} ({path})" for key, path in missing.items())
        typer.echo(
            f"baton: {file}: not checked, because absent or not readable here: {names}", err=True
        )
    print(f"{file}: ok")


@contextmanager
def _warnings_collected() -> Iterator[list[str]]:
    """Yields a list that gets the warnings which the checks log."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    collector, logger = Collector(logging.WARNING), logging.getLogger("baton")
    logger.addHandler(collector)
    try:
        yield found
    finally:
        logger.removeHandler(collector)


def _check_as_processes_do(config: BatonConfig) -> dict[str, str]:
    """Makes the checks that `baton up` and `baton gateway` make when they start.

    Returns:
        The files that this user cannot read on this host, by configuration key.

    Raises:
        ConfigError: A check failed.
    """
    # Imported here, because it imports gRPC, which the other commands of this module do not need.
    from baton.runtime.security import security_files

    for key, address in (
        ("coordinator.listen", config.coordinator.listen),
        ("coordinator.metrics_listen", config.coordinator.metrics_listen),
        ("worker.metrics_listen", config.worker.metrics_listen),
        ("kv_transfer.listen", config.kv_transfer.listen),
        ("http.listen", config.http.listen),
    ):
        # Only the transfer service's and the gateway's addresses may be empty.
        if address or key not in ("kv_transfer.listen", "http.listen"):
            split_address(address, key)
    exposure.check_all(config)
    if config.http.cells:
        configured_cells(config, [])
    check_sizes(config)
    return security_files.check_present(config.security)


@app.command()
def keys(
    part: Annotated[
        str, typer.Argument(metavar="PART", help="List only the keys whose names contain PART.")
    ] = "",
    as_json: options.Json = False,
) -> None:
    """List all keys with their defaults and meanings."""
    found = [key for key in known() if part in key.name]
    if not found:
        hint = did_you_mean(part, [key.name for key in known()])
        raise ConfigError(f"no key has {part!r} in its name{hint}")
    if as_json:
        return print_json([key._asdict() for key in found])
    rows = [(key.name, json.dumps(key.default), key.meaning) for key in found]
    return print_table(("KEY", "DEFAULT", "MEANING"), rows, "")


@app.command()
def show(config: options.ConfigFile = None) -> None:
    """Print the effective configuration as YAML.

    The output contains all defaults and no secrets.
    """
    print(shown(load(config)), end="")
