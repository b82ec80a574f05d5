"""Tries to start engines on models without weights."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

from baton.engine.base import EngineDead
from baton.engine.vllm_engine import VllmEngine


async def said(cases: dict[str, Any]) -> dict[str, str]:
    messages = {}
    # vLLM's temporary files lie beside the socket: it inspects models by way of some.
    with tempfile.TemporaryDirectory() as own:
        for name, (directory, engine_args, adapters) in cases.items():
            engine = VllmEngine(directory, "m", engine_args, f"{own}/kv.sock", adapters)
            try:
                await engine.start()
            except EngineDead as error:
                messages[name] = str(error)
            await engine.stop()
    return messages


def main(cases: dict[str, Any]) -> dict[str, str]:
    """What each start says, by case: a model's directory, vLLM's arguments, and adapters."""
    return asyncio.run(said(cases))
