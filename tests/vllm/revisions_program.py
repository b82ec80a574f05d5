"""Configures vLLM for several models and arguments, and says what their KV caches are called."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from baton.engine.vllm_setup import VllmSetup
from baton.kvtransfer.connector.disk_tier import DISK

HOST_BYTES, DISK_BYTES = 2**26, 2**30


def main(cases: dict[str, tuple[str, dict[str, Any], dict[str, str]]]) -> dict[str, Any]:
    """Returns each case's revision, and the namespace of its files; None: no disk is used.

    A case has a model directory, vLLM's arguments, and variables of the environment.
    """
    made = {}
    for name, (model, engine_args, environment) in cases.items():
        os.environ.update(environment)
        with tempfile.TemporaryDirectory() as own:
            setup = VllmSetup.make(
                model, "m", engine_args, {}, f"{own}/kv.sock", Path(own), host_bytes=HOST_BYTES
            )
            directory = setup.open_disk(f"{own}/disk", DISK_BYTES)
            extra = setup.config.kv_transfer_config.kv_connector_extra_config
            if directory is not None:
                directory.close()
            made[name] = {
                "revision": setup.layout.revision,
                "namespace": extra[DISK]["namespace"] if directory is not None else None,
            }
        for variable in environment:
            del os.environ[variable]
    return made
