"""Answers of vLLM's second model runner, with Baton or alone; see interpreted/sitecustomize.py.

`python second_runner_program.py split|plain MODEL OUTPUT < cases.json`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import vllm_reference
from engine_handoffs import handed_over, side

from baton.engine import vllm_setup


async def split(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs the cases on a prefill and a decode engine of one rank each.

    Requests wait for their loads, as on GPUs.
    """
    vllm_setup.requests_wait = lambda: True
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        sides = [
            await stack.enter_async_context(
                side(model, 1, str(directory / name), kv_cache_memory_bytes=2**21)
            )
            for name in ("p.sock", "d.sock")
        ]
        made = await handed_over(*sides, given)
        runners = [each.engine._input.vllm_config.use_v2_model_runner for each in sides]
    return {**made, "has_second_runner": all(runners)}


def main(how: str, model: str, given: dict[str, Any]) -> Any:
    if how == "split":
        return asyncio.run(split(model, given))
    return vllm_reference.main(model, {"cases": given["one_by_one"] + given["together"]})


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(main(*sys.argv[1:3], json.load(sys.stdin))))
