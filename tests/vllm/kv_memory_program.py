"""Compares the KV cache of an engine under Baton with plain vLLM's, for the same memory."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

from vllm import LLM

from baton.runtime.process import affinity
from tests.vllm import other_models_program as models
from tests.vllm.engine_handoffs import ENGINE_ARGS, side
from tests.vllm.forked_engines import fork_engines


async def under_baton(model: str, directory: Path, engine_args: dict[str, Any]) -> dict[str, Any]:
    async with side(model, 1, str(directory / "kv.sock"), **engine_args) as one:
        layout, tokens = one.info.layout, one.info.kv_tokens
        longest = layout.handoff_bytes(layout.num_blocks(ENGINE_ARGS["max_model_len"]))
        return {"kv_tokens": tokens, "token_bytes": layout.token_bytes, "handoff_bytes": longest}


def plain(model: str, engine_args: dict[str, Any]) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    engine = LLM(model=model, **ENGINE_ARGS | engine_args)
    return int(engine.llm_engine.vllm_config.cache_config.kv_cache_size_tokens)


def main(name: str) -> dict[str, Any]:
    """Returns both sizes in tokens, for requests of the longest length."""
    fork_engines()
    engine_args = {**models.ENGINE_ARGS, **models.OWN_ARGS.get(name, {})}
    with tempfile.TemporaryDirectory(prefix="baton-") as own:
        directory = Path(own)
        model = models.make(name, directory / "model")
        found = asyncio.run(under_baton(model, directory, engine_args))
        os.environ.pop(affinity.VLLM_BIND_THREADS, None)
        return {**found, "plain_kv_tokens": plain(model, engine_args)}
