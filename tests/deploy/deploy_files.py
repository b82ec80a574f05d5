"""Helpers that read the files of deploy/ for several tests."""

from __future__ import annotations

import re
from pathlib import Path

import typer
import yaml

from baton.cli.main import app
from baton.runtime.config import BatonConfig, load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMMANDS = typer.main.get_command(app)
# Time beyond the drain timeout for a process to detach and to close the engine.
STOP_MARGIN_S = 15
_UNITS = {"": 1, "m": 1e-3, "Mi": 2**20, "Gi": 2**30, "mb": 2**20, "gb": 2**30}


def documents(path: Path) -> list[dict]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def quantity(text: str | int) -> float:
    """Parses a quantity of Kubernetes or compose, such as 500m, 8Gi or 2gb."""
    found = re.fullmatch(r"([\d.]+)([A-Za-z]*)", str(text))
    assert found is not None, text
    return float(found[1]) * _UNITS[found[2]]


def seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m)", text)
    assert found is not None, text
    return float(found[1]) * {"s": 1, "m": 60}[found[2]]


def options(arguments: list[str]) -> tuple[str, dict]:
    """Parses an argument list with the CLI's own parser; returns the command and its options."""
    name, *rest = arguments
    context = COMMANDS.commands[name].make_context(name, list(rest))
    given = {key: value for key, value in context.params.items() if value is not None}
    if name == "gateway":
        # In deploy/ a gateway serves one cell.
        (given["coordinator"],) = given["coordinator"]
    return name, given


def drain_s(command: str, config: BatonConfig) -> float:
    """Returns the drain timeout of a process in seconds."""
    times = {
        "worker": config.worker.drain_timeout_s,
        "gateway": config.http.drain_timeout_s,
        "coordinator": config.coordinator.drain_timeout_s,
    }
    # `up` drains gateway, coordinator and workers one after the other.
    return sum(times.values()) if command == "up" else times[command]


def listens(command: str, config: BatonConfig) -> set[int]:
    """Returns the ports that a process listens on."""
    coordinator = {config.coordinator.listen, config.coordinator.metrics_listen}
    addresses = {
        "worker": {config.worker.metrics_listen},
        "gateway": {config.http.listen},
        "coordinator": coordinator,
        "up": coordinator | {config.http.listen},
    }[command]
    assert all(address.startswith("0.0.0.0:") for address in addresses)
    return {int(address.rpartition(":")[2]) for address in addresses}


def config(path: Path) -> BatonConfig:
    return load(str(path))
