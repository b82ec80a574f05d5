"""Options that several commands share, and the configuration built from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.runtime.config import BatonConfig


# Largest value of a uint32 field of the protobuf messages; longest time until an expiry date, in
# days (a century).
MOST, MOST_DAYS = 2**32 - 1, 36_525


class EngineName(StrEnum):
    VLLM = "vllm"
    SIMULATED = "simulated"


class LauncherName(StrEnum):
    LOCAL = "local"
    RAY = "ray"


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
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Print again after every change, until Ctrl-C."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def load_config(
    path: str | None,
    *,
    model: str | None = None,
    served_model_name: str | None = None,
    engine: EngineName | None = None,
    engine_args: list[str] | None = None,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    log_level: LogLevel | None = None,
    listen: str | None = None,
    num_prefill: int | None = None,
    num_decode: int | None = None,
    elastic: bool | None = None,
    autoscale: bool | None = None,
    http_listen: str | None = None,
    launcher: LauncherName | None = None,
    revision: str | None = None,
    targets: Mapping[str, int | None] | None = None,
) -> BatonConfig:
    """Reads the configuration file; options of the command line override its values.

    `targets` are keys of scaling.targets.interactive.

    Raises:
        ConfigError: The file or an option is invalid.
    """
    from baton.runtime.config import load

    return load(
        path,
        {
            "model": model,
            "served_model_name": served_model_name,
            "engine": engine and engine.value,
            "engine_args": parse_engine_args(engine_args or []),
            "tool_call_parser": tool_call_parser,
            "reasoning_parser": reasoning_parser,
            "log_level": log_level and log_level.value,
            "coordinator": {"listen": listen},
            "prefill": {"workers": num_prefill},
            "decode": {"workers": num_decode},
            "elastic": elastic,
            "scaling": {"autoscale": autoscale, "targets": {"interactive": dict(targets or {})}},
            "http": {"listen": http_listen},
            "launcher": launcher and launcher.value,
            "worker": {"revision": revision},
        },
    )


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


def parse_engine_args(arguments: list[str]) -> dict[str, Any]:
    """Parses KEY=VALUE pairs; keys may have hyphens, as on vLLM's own command line.

    Raises:
        typer.BadParameter: A pair is not KEY=VALUE, or its value is not YAML that JSON can hold.
    """
    import json

    import yaml

    values = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{argument!r} is not KEY=VALUE", param_hint="--engine-arg")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise typer.BadParameter(
                f"{key}: value is not YAML: {reason}", param_hint="--engine-arg"
            ) from None
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            # YAML reads 2024-01-01 as a date.
            raise typer.BadParameter(
                f"{key}: is {text}; must be a value that JSON can hold; a text may need quotes",
                param_hint="--engine-arg",
            ) from None
        values[key.removeprefix("--").replace("-", "_")] = value
    return values


def resolve_addresses(addresses: str | None, option: str = "--address") -> list[str]:
    """Splits a list of coordinator addresses; returns at least one address.

    Args:
        addresses: Addresses separated by commas; None or empty: the default listen address.
        option: Name of the option or key, for error messages.

    Raises:
        ConfigError: An address is not host:port.
    """
    from baton.runtime.addresses import split_address

    if not addresses:
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
