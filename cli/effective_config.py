"""The configuration that a command uses: its file, with the command line's options on top."""

from __future__ import annotations

from collections.abc import Mapping

from baton.cli.engine_args import parse_engine_args
from baton.cli.options import EngineName, LauncherName, LogLevel
from baton.runtime.config import BatonConfig, load


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
