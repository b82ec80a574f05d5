"""Engines with one and with two pipeline stages, which hand over to each other."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from baton.runtime.process import affinity
from tests.vllm.engine_handoffs import handed_over, left_behind, side
from tests.vllm.forked_engines import fork_engines
from tests.vllm.other_models_program import ENGINE_ARGS, OWN_ARGS, answered_alone, make


async def run(name: str, sizes: list[int], given: dict[str, Any]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        model = make(name, directory / "model")
        sides = []
        for number, num_stages in enumerate(sizes):
            # The cores of one engine's ranks must not bind another engine's.
            os.environ.pop(affinity.VLLM_BIND_THREADS, None)
            begun = side(
                model,
                1,
                str(directory / f"{number}.sock"),
                # Host memory is not used with several stages.
                host_bytes=2**20,
                # In bfloat16, answers depend on the chunks of a prompt.
                scheduler="vllm" if OWN_ARGS.get(name) else "baton",
                pipeline_parallel_size=num_stages,
                **ENGINE_ARGS | OWN_ARGS.get(name, {}),
            )
            sides.append(await stack.enter_async_context(begun))
        results, alone = [], {}
        for way, of_way in given.items():
            sender, receiver = (sides[int(number)] for number in way.split(" to "))
            results += (await handed_over(sender, receiver, of_way))["results"]
            for case in of_way["one_by_one"] + of_way["together"]:
                alone[case["name"]] = await answered_alone(sides[0], case)
        layouts = [each.info.layout for each in sides]
        return {
            "results": results,
            "alone": alone,
            "left": await left_behind(*sides),
            "num_stages": [layout.pp_size for layout in layouts],
            "num_layers": [[group.num_layers for group in layout.groups] for layout in layouts],
            "host_tokens": [each.info.host_kv_tokens for each in sides],
        }


def main(name: str, sizes: list[int], given: dict[str, Any]) -> dict[str, Any]:
    """Returns the results.

    Args:
        name: Name of the model, in other_models_program.py.
        sizes: Number of stages of each engine.
        given: Cases, one by one and together, by their way, such as "0 to 1": from the first engine
            to the second one.
    """
    fork_engines()
    return asyncio.run(run(name, sizes, given))
