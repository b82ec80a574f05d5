"""Options that several commands share, and the configuration they give."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from baton.runtime.config import BatonConfig


# What the contract's numbers hold, and days that a date can be away: a century.
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
    str | None, typer.Option("--config", metavar="FILE", help="YAML; - is standard input.")
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        help='Local directory, hub id, or "glossary": a toy that ships with Baton (the default).',
    ),
]
ServedModelName = Annotated[
    str | None, typer.Option("--served-model-name", help="What requests call the model.")
]
Engine = Annotated[EngineName | None, typer.Option("--engine", help="Default: vllm.")]
EngineArgs = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-arg",
        metavar="KEY=VALUE",
        help="The engine's own argument, value in YAML; repeatable.",
    ),
]
ToolCallParser = Annotated[
    str | None,
    typer.Option("--tool-call-parser", help="vLLM's, by its name there: takes tools over HTTP."),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option("--reasoning-parser", help="vLLM's, by its name there."),
]
Level = Annotated[LogLevel | None, typer.Option("--log-level", help="Default: info.")]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        envvar="BATON_ADDRESS",
        metavar="HOST:PORT,...",
        help="The coordinator's, or several; left out: where one listens by default.",
    ),
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Again whenever something changes, until Ctrl-C."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


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
    autoscale: bool | None = None,
    http_listen: str | None = None,
    launcher: LauncherName | None = None,
    revision: str | None = None,
) -> BatonConfig:
    """The file's configuration with the command line's options over it.

    Raises:
        ConfigError: the file or an option is wrong.
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
            "scaling": {"autoscale": autoscale},
            "http": {"listen": http_listen},
            "launcher": launcher and launcher.value,
            "worker": {"revision": revision},
        },
    )


def parse_engine_args(arguments: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs; a key may be spelled with hyphens, as on vLLM's own command line."""
    import yaml

    values = {}
    for argument in arguments:
        key, separator, text = argument.partition("=")
        if not separator or not key:
            raise typer.BadParameter(f"{argument!r} is not KEY=VALUE", param_hint="--engine-arg")
        try:
            values[key.removeprefix("--").replace("-", "_")] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise typer.BadParameter(
                f"{key}: value is not YAML: {reason}", param_hint="--engine-arg"
            ) from None
    return values


def resolve_addresses(addresses: str | None, option: str = "--address") -> list[str]:
    """The coordinators' addresses; at least one.

    Args:
        addresses: separated by commas; None or empty: where one listens by default.
        option: that they came by, for errors.

    Raises:
        ConfigError: one of them is not host:port.
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
    """The last part of a path as text: names are bytes, and most are UTF-8 whatever the locale."""
    return os.fsencode(path.name).decode(errors="replace")


def check_writable(path: Path | None, option: str, *, replaced: bool = False) -> None:
    """Before the work that the file is for: raises typer.BadParameter where it cannot be written.

    Args:
        path: of the file, which need not be there; None: none is wanted.
        option: that it came by.
        replaced: what is there is replaced once the new one is whole, and not written into.
    """
    if path is None:
        return
    problem = ""
    if path.is_dir():
        problem = "is a directory"
    elif replaced and path.exists() and not path.is_file():
        # Such as /dev/null, which would be a device no more.
        problem = "is not a regular file"
    elif not path.parent.is_dir():
        problem = f"cannot be written: there is no directory {path.parent}"
    elif not os.access(path.parent if replaced or not path.exists() else path, os.W_OK):
        problem = "cannot be written"
    if problem:
        raise typer.BadParameter(f"{path} {problem}", param_hint=option)
