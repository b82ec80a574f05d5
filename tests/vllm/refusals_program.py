"""Tries to start engines on models without weights."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from baton.engine.base import EngineDead
from baton.engine.served_model import ServedModel
from baton.engine.vllm_engine import VllmEngine


async def said(cases: dict[str, Any]) -> dict[str, str]:
    messages = {}
    # vLLM's temporary files lie beside the socket; vLLM inspects models through some of them.
    with tempfile.TemporaryDirectory() as own:
        for name, (directory, engine_args, adapters) in cases.items():
            served = ServedModel(directory, "m", engine_args, adapters)
            engine = VllmEngine(served, f"{own}/kv.sock")
            try:
                await engine.start()
            except EngineDead as error:
                messages[name] = str(error)
            await engine.stop()
    return messages


def main(cases: dict[str, Any]) -> dict[str, str]:
    """Returns each start's error. A case has a model directory, vLLM's arguments and adapters."""
    return asyncio.run(said(cases))
