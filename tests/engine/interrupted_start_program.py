"""Stops an engine before vLLM has begun its processes: prints how many it began after that.

A process of its own, because vLLM takes seconds to import and warns while it does.
`python interrupted_start_program.py`
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import threading
from unittest import mock

from baton.engine.vllm_engine import EngineCoreClient, RefusingEngineArgs, VllmEngine
from baton.runtime import demo_model

ARGUMENTS = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256}


async def main() -> None:
    configuring, go_on, over = threading.Event(), threading.Event(), threading.Event()
    configure, start = RefusingEngineArgs.create_engine_config, VllmEngine._start

    def slow_configure(*args, **kwargs):
        configuring.set()
        go_on.wait()
        return configure(*args, **kwargs)

    def told_start(engine):
        try:
            return start(engine)
        finally:
            over.set()

    with (
        tempfile.TemporaryDirectory() as own,
        contextlib.redirect_stdout(sys.stderr),
        mock.patch.object(RefusingEngineArgs, "create_engine_config", slow_configure),
        mock.patch.object(EngineCoreClient, "make_async_mp_client") as begin,
        mock.patch.object(VllmEngine, "_start", told_start),
    ):
        model = demo_model.ensure("demo")
        engine = VllmEngine(model, "m", ARGUMENTS, f"{own}/kv.sock")
        starting = asyncio.create_task(engine.start())
        await asyncio.to_thread(configuring.wait)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        go_on.set()
        await stopping
        await asyncio.to_thread(over.wait)
        num_begun = begin.call_count
    print(num_begun)


if __name__ == "__main__":
    asyncio.run(main())
