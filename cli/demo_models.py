"""Creates or finds the built-in demo models before any process starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from baton.runtime import demo_model
from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError


def with_demo_model(config: BatonConfig) -> BatonConfig:
    """Replaces the name of a demo model by its directory; any other model stays unchanged.

    Raises:
        ConfigError: The demo model cannot be created, or its files are missing.
    """
    found = demo_model.ensure(config.model, weights=False)
    if found == config.model:
        return config
    directory = Path(found)
    if config.engine != "simulated" and not (directory / "model.safetensors").exists():
        print(f"baton: creating the {config.model} model in {directory}", file=sys.stderr)
        _make_weights(config.model)
    return config.model_copy(
        update={"model": str(directory), "served_model_name": config.model_name}
    )


def _make_weights(name: str) -> None:
    # A child process creates the weights, so that the coordinator does not keep torch in memory.
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
        lines = made.stderr.strip().splitlines() or [
            "the process that creates the demo model failed without a message"
        ]
        raise ConfigError(lines[-1])
