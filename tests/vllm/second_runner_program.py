"""Answers of vLLM's second model runner, with Baton and alone; see interpreted/sitecustomize.py.

Arguments: MODEL DIRECTORY; it reads the cases from standard input.

It runs in a process with another environment than the tests' process, so it has a fork server of
its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.vllm_programs import Program

HOW = ("split", "plain")


async def split(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs the cases on a prefill and a decode engine of one rank each."""
    from tests.vllm.engine_handoffs import handed_over, side

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
    """Returns the results of the cases with Baton ("split"), or of plain vLLM ("plain")."""
    from tests.vllm import vllm_reference
    from tests.vllm.forked_engines import fork_engines

    if how == "plain":
        return vllm_reference.main(model, {"cases": given["one_by_one"] + given["together"]})
    fork_engines()
    return asyncio.run(split(model, given))


def run(model: str, directory: Path) -> dict[str, Any]:
    """Runs both at the same time."""
    given = json.load(sys.stdin)
    with contextlib.ExitStack() as stack:
        running = {}
        for how in HOW:
            (directory / how).mkdir()
            program = Program(Path(__file__).stem, how, model, given, directory=directory / how)
            running[how] = stack.enter_context(program)
        return {how: program.result() for how, program in running.items()}


if __name__ == "__main__":
    results = run(sys.argv[1], Path(sys.argv[2]))
    (Path(sys.argv[2]) / "results.json").write_text(json.dumps(results))
