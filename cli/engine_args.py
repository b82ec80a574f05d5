"""Values of the option --engine-arg."""

from __future__ import annotations

import json
from typing import Any

import typer
import yaml


def parse_engine_args(arguments: list[str]) -> dict[str, Any]:
    """Parses KEY=VALUE pairs; keys may have hyphens, as on vLLM's own command line.

    Raises:
        typer.BadParameter: A pair is not KEY=VALUE, or its value is not YAML that JSON can hold.
    """
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
