"""Engines with a draft that keeps a KV cache, with another draft's and without one, and one alone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import draft_checkpoints
import vllm_cases as cases
from engine_handoffs import Side, hand_over, left_behind, side
from forked_engines import fork_engines

from baton.engine.base import EngineRequest, ReceiveHandoff, RequestRejected
from baton.runtime import affinity
from baton.v1 import common_pb2

# Tokens that a step drafts for a request.
NUM_DRAFTED = 3
ENGINE_ARGS = {
    "kv_cache_memory_bytes": 2**21,
    # See other_models_program.py.
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
}


def speculation(kind: str, model: str, directory: Path) -> dict[str, Any]:
    """Returns vLLM's setting for a kind of draft, whose checkpoint it writes."""
    if kind == "mtp":
        return {"method": kind, "num_speculative_tokens": NUM_DRAFTED}
    make = {
        "eagle": draft_checkpoints.make_eagle,
        "eagle3": draft_checkpoints.make_eagle3,
        # The model itself is the draft.
        "draft_model": lambda model, _: model,
    }[kind]
    draft = make(model, directory / kind)
    return {"method": kind, "model": draft, "num_speculative_tokens": NUM_DRAFTED}


class Accepted:
    """Counts what share of the drafted tokens of an engine are right."""

    def __init__(self, one: Side) -> None:
        self._one, self._before = one, dict(one.counts)

    def share(self, num_undrafted: int = 0) -> float:
        """Returns the share since the construction.

        Args:
            num_undrafted: Number of steps whose token was not drafted: those that end a prompt.
        """
        steps, tokens = (self._one.counts[key] - self._before[key] for key in ("steps", "tokens"))
        return (tokens - steps) / (NUM_DRAFTED * (steps - num_undrafted))


async def alone(one: Side, given: list[cases.Case], suffix: str) -> dict[str, list[int]]:
    """Returns the answers of one engine without handoffs."""
    made = {}
    for case in given:
        sampling = common_pb2.SamplingParams(**case["sampling"])
        request = EngineRequest(f"{case['name']}-{suffix}", case["prompt"], sampling)
        made[case["name"]] = (await one.finish(request))[0]
    return made


async def handed_over(
    prefill: Side, decode: Side, given: list[cases.Case]
) -> list[dict[str, Any]]:
    return [await hand_over(prefill, decode, case) for case in given]


async def refused(one: Side) -> str:
    """Returns why the engine does not continue a seeded output that another one began."""
    sampling = common_pb2.SamplingParams(temperature=1.0, seed=7, max_tokens=8)
    handoff = ReceiveHandoff(secrets.token_bytes(16), 20, 1.0)
    request = EngineRequest(
        "seeded", cases.prompt(20, 90), sampling, known_token_ids=[7], receive=handoff
    )
    try:
        await one.finish(request)
    except RequestRejected as error:
        return str(error)
    return ""


async def reloaded(one: Side, case: cases.Case) -> dict[str, Any]:
    """Answers a prompt, and again when its blocks are in host memory only."""
    before = Accepted(one)
    await alone(one, [case], "first")
    shares = [before.share(1)]
    for number in range(8):
        other = cases.prompt(250, 900 + number)
        await alone(one, [cases.greedy(f"evicts-{number}", other, 1)], "first")
    again = Accepted(one)
    sampling = common_pb2.SamplingParams(**case["sampling"])
    tokens, first = await one.finish(EngineRequest("reloaded", case["prompt"], sampling))
    shares.append(again.share(1))
    return {"tokens": tokens, "num_host": first.num_host_tokens, "shares": shares}


async def run(kind: str, given: dict[str, list[cases.Case]]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        make = draft_checkpoints.make_latent if kind == "mtp" else draft_checkpoints.make_llama
        model = make(directory / "model")
        draft = {"speculative_config": speculation(kind, model, directory)}

        async def started(name: str, **engine_args: Any) -> Side:
            # The cores of one engine's ranks must not bind another engine's.
            os.environ.pop(affinity.VLLM_BIND_THREADS, None)
            arguments = {**ENGINE_ARGS, **engine_args}
            begun = side(model, 1, str(directory / f"{name}.sock"), **arguments)
            return await stack.enter_async_context(begun)

        prefill = await started("p", host_bytes=2**23, **draft)
        decode = await started("d", **draft)
        plain = await started("plain")
        made: dict[str, Any] = {"layers": [one.info.layout.num_all_layers for one in (decode, plain)]}
        made["expected"] = await alone(plain, given["sent"] + given["left_out"], "plain")
        for name, sender in (("left_out", plain), ("sent", prefill)):
            accepted = Accepted(decode)
            made[name] = await handed_over(sender, decode, given[name])
            made[f"share_{name}"] = accepted.share()
            accepted = Accepted(prefill)
            made[f"alone_{name}"] = await alone(prefill, given[name], "alone")
            made[f"share_alone_{name}"] = accepted.share(len(given[name]))
        made["without"] = await handed_over(prefill, plain, given["without"])
        made["expected"] |= await alone(plain, given["without"], "plain")
        made["refused"] = await refused(decode)
        made["reloaded"] = await reloaded(prefill, given["sent"][-1]) if kind == "eagle" else None
        made["left"] = await left_behind(prefill, decode, plain)
    return made


def main(kind: str, given: dict[str, list[cases.Case]]) -> dict[str, Any]:
    fork_engines()
    return asyncio.run(run(kind, given))
