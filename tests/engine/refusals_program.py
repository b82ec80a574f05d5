"""Tries to start engines on models without weights: cases in on stdin, what they say on stdout.

A process of its own, because vLLM takes seconds to import and warns while it does.
`python refusals_program.py < cases.json`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile

from baton.engine.base import EngineDead
from baton.engine.vllm_engine import VllmEngine


async def main() -> None:
    messages = {}
    # vLLM's temporary files lie beside the socket: it inspects models by way of some.
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(sys.stderr):
        for name, (directory, engine_args, adapters) in json.load(sys.stdin).items():
            engine = VllmEngine(directory, "m", engine_args, f"{own}/kv.sock", adapters)
            try:
                await engine.start()
            except EngineDead as error:
                messages[name] = str(error)
            await engine.stop()
    print(json.dumps(messages))


if __name__ == "__main__":
    asyncio.run(main())
