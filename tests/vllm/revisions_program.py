"""Configures vLLM for several models and arguments, and says what their KV caches are called."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from baton.engine.served_model import ServedModel
from baton.engine.vllm_setup import VllmSetup
from baton.kvtransfer.connector.tiers.disk_tier import DISK

HOST_BYTES, DISK_BYTES = 2**26, 2**30


def main(cases: dict[str, tuple[str, dict[str, Any], dict[str, str]]]) -> dict[str, Any]:
    """Returns each case's revision, and the namespace of its files; None: no disk is used.

    A case has a model directory, vLLM's arguments, and variables of the environment.
    """
    # vLLM's temporary files lie beside the socket.
    with tempfile.TemporaryDirectory() as own:
        return {name: _described(Path(own), *case) for name, case in cases.items()}


def _described(
    own: Path, model: str, engine_args: dict[str, Any], environment: dict[str, str]
) -> dict[str, str | None]:
    with mock.patch.dict(os.environ, environment):
        setup = VllmSetup.make(
            ServedModel(model, "m", engine_args), str(own / "kv.sock"), own, host_bytes=HOST_BYTES
        )
        directory = setup.open_disk(str(own / "disk"), DISK_BYTES)
    extra = setup.config.kv_transfer_config.kv_connector_extra_config
    if directory is None:
        return {"revision": setup.layout.revision, "namespace": None}
    directory.close()
    return {"revision": setup.layout.revision, "namespace": extra[DISK]["namespace"]}
