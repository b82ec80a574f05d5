"""Stops an engine before vLLM has started its processes."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from typing import Any
from unittest import mock

from baton.engine.served_model import ServedModel
from baton.engine.vllm_config import RefusingEngineArgs
from baton.engine.vllm_engine import EngineCoreClient, VllmEngine
from baton.runtime import demo_model

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}


async def num_begun() -> int:
    configuring, go_on, over = threading.Event(), threading.Event(), threading.Event()
    configure, start = RefusingEngineArgs.create_engine_config, VllmEngine._start

    def slow_configure(*args: Any, **kwargs: Any) -> Any:
        configuring.set()
        go_on.wait()
        return configure(*args, **kwargs)

    def told_start(engine: VllmEngine) -> Any:
        try:
            return start(engine)
        finally:
            over.set()

    with (
        tempfile.TemporaryDirectory() as own,
        mock.patch.object(RefusingEngineArgs, "create_engine_config", slow_configure),
        mock.patch.object(EngineCoreClient, "make_async_mp_client") as begin,
        mock.patch.object(VllmEngine, "_start", told_start),
    ):
        model = demo_model.ensure("demo")
        engine = VllmEngine(ServedModel(model, "m", ARGUMENTS), f"{own}/kv.sock")
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(configuring.wait)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
        await asyncio.to_thread(over.wait)
        count: int = begin.call_count
    return count


def main() -> int:
    """Returns how many processes vLLM starts after the stop."""
    return asyncio.run(num_begun())
