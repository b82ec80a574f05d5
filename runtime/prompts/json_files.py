"""Reads the JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from baton.runtime.config_error import ConfigError


def read_json(path: Path) -> dict[str, Any]:
    """Object in an optional JSON file; empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model: {path} is a {type(value).__name__}; must be an object")
    return value
