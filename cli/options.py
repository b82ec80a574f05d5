"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from baton.runtime.network.addresses import split_address

# Largest value of a uint32 field of the protobuf messages; longest time until an expiry date, in
# days (a century).
MOST, MOST_DAYS = 2**32 - 1, 36_525


class EngineName(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class LauncherName(StrEnum):
    LOCAL = "local"
    RAY = "ray"


class LaneName(StrEnum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="Configuration file in YAML; - reads standard input."
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Local directory or Hugging Face model ID. The default is glossary, a toy model that "
        "ships with Baton.",
    ),
]
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", help="Name by which requests call the model.")
]
Engine = Annotated[
    EngineName | None, typer.Option("--engine", help="Engine of the workers; default: vllm.")
]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="KEY=VALUE",
        help="Argument of the engine, with its value in YAML; repeatable.",
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option(
        "--tool-call-parser",
        help="Name of vLLM's parser that finds tool calls in outputs; allows tools over HTTP.",
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser", help="Name of vLLM's parser that separates reasoning from the answer."
    ),
]
Level = Annotated[
    LogLevel | None,
    typer.Option("--log-level", help="Lowest level of the log lines; default: info."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="BATON_ADDRESS",
        metavar="HOST:PORT,...",
        help="Address of the coordinator, or several addresses separated by commas; default: "
        "127.0.0.1:7070.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help="gRPC address of the coordinator; port 0 picks a free port.",
    ),
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Print again after every change, until Ctrl-C."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def split_workers(
    workers: int | None, prefill: int | None, decode: int | None
) -> tuple[int | None, int | None]:
    """Returns the sizes of the prefill and decode pools: half of --workers each, or as given.

    Raises:
        typer.BadParameter: --workers is used with --prefill or --decode.
    """
    if workers is None:
        return prefill, decode
    if prefill is not None or decode is not None:
        raise typer.BadParameter(
            "cannot be used with --prefill or --decode", param_hint="--workers"
        )
    return workers // 2, workers - workers // 2


def resolve_addresses(addresses: str | None, option: str = "--address") -> list[str]:
    """Splits a list of coordinator addresses; returns at least one address.

    Args:
        addresses: Addresses separated by commas; None or empty: the default listen address.
        option: Name of the option or key, for error messages.

    Raises:
        ConfigError: An address is not host:port.
    """
    if not addresses:
        # Imported only without an address: the configuration takes as long to import as gRPC.
        from baton.runtime.config import CoordinatorConfig

        addresses = CoordinatorConfig().listen
    found = [one.strip() for one in addresses.split(",")]
    for address in found:
        split_address(address, option)
    return found


def file_name(path: Path) -> str:
    """Returns the last part of a path, decoded as UTF-8 independent of the locale."""
    return os.fsencode(path.name).decode(errors="replace")


def check_writable(path: Path | None, option: str, *, replaced: bool = False) -> None:
    """Raises typer.BadParameter if the file cannot be written; called before the long work.

    Args:
        path: Path of the file, which need not exist; None if no file is wanted.
        option: Name of the option, for the error message.
        replaced: Whether the command replaces an existing file with a complete new one.
    """
    if path is None:
        return
    problem = ""
    if path.is_dir():
        problem = "is a directory"
    elif replaced and path.exists() and not path.is_file():
        # For example /dev/null, which must stay a device.
        problem = "is not a regular file"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no directory {path.parent}"
    elif not os.access(path.parent if replaced or not path.exists() else path, os.W_OK):
        problem = "cannot be written"
    if problem:
        raise typer.BadParameter(f"{path} {problem}", param_hint=option)
