"""The demo models, made or found before anything starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baton.runtime import demo_model
from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError


def with_demo_model(config: BatonConfig) -> BatonConfig:
    """The configuration with a demo model as a directory; any other model stays as it is.

    Raises:
        ConfigError: the model cannot be made, or is not where it should be.
    """
    found = demo_model.ensure(config.model, weights=False)
    if found == config.model:
        return config
    directory = Path(found)
    if config.engine != "simulated" and not (directory / "model.safetensors").exists():
        print(f"baton: making the {config.model} model in {directory}", file=sys.stderr)
        _make_weights(config.model)
    return config.model_copy(
        update={"model": str(directory), "served_model_name": config.model_name}
    )


def _make_weights(name: str) -> None:
    # In a process of its own: the coordinator should not carry torch for the rest of its life.
    code = (
        "import sys\n"
        "from baton.runtime import demo_model\n"
        "from baton.runtime.config_error import ConfigError\n"
        "try:\n"
        "    demo_model.ensure(sys.argv[1])\n"
        "except ConfigError as error:\n"
        "    sys.exit(str(error))\n"
    )
    made = subprocess.run([sys.executable, "-c", code, name], capture_output=True, text=True)
    if made.returncode != 0:
        lines = made.stderr.strip().splitlines() or ["no reason given"]
        raise ConfigError(lines[-1])
