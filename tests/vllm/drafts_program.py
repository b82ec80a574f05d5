"""Engines of one model with drafts that keep a KV cache, and one without a draft."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from baton.engine.base import EngineRequest, RequestRejected
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.runtime.process import affinity
from baton.v1 import common_pb2
from tests.vllm import draft_checkpoints
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import Side, hand_over, left_behind, side
from tests.vllm.engine_recoveries import recovered
from tests.vllm.forked_engines import fork_engines

# Tokens that a step drafts for a request.
NUM_DRAFTED = 3
# Known tokens of an output at each loss of its decode worker.
LOST_AFTER = [2, 15]
# See other_models_program.py.
ENGINE_ARGS = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
LLAMA_ARGS = {"kv_cache_memory_bytes": 5 * 2**19}
# On CPUs vLLM computes each prompt of this model in one step.
LATENT_ARGS = {"kv_cache_memory_bytes": 2**24, "max_num_batched_tokens": cases.MAX_MODEL_LEN}


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

    def share(self, num_requests: int) -> float:
        """Returns the share since the construction.

        Args:
            num_requests: Number of requests since then; the first step of each has no drafts.
        """
        steps, tokens = (self._one.counts[key] - self._before[key] for key in ("steps", "tokens"))
        return (tokens - steps) / (NUM_DRAFTED * (steps - num_requests))


async def alone(one: Side, given: list[cases.Case], suffix: str) -> dict[str, list[int]]:
    """Returns the answers of one engine without handoffs."""
    made = {}
    for case in given:
        sampling = common_pb2.SamplingParams(**case["sampling"])
        request = EngineRequest(f"{case['name']}-{suffix}", case["prompt"], sampling)
        made[case["name"]] = (await one.finish(request))[0]
    return made


async def handed_over(prefill: Side, decode: Side, given: list[cases.Case]) -> list[dict[str, Any]]:
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


async def compared(
    prefill: Side, decode: Side, plain: Side, given: dict[str, list[cases.Case]]
) -> dict[str, Any]:
    """Hands prompts over between ends of which both, one or the other have the draft.

    Args:
        prefill: An engine with the draft.
        decode: Another one, or the same one without prefix caching.
        plain: An engine without a draft.
        given: Cases by way.
    """
    made: dict[str, Any] = {"num_layers": decode.info.layout.num_all_layers}
    made["expected"] = await alone(plain, [one for way in given.values() for one in way], "plain")
    for way, sender in (("left_out", plain), ("sent", prefill)):
        accepted = Accepted(decode)
        made[way] = await handed_over(sender, decode, given[way])
        made[f"share_{way}"] = accepted.share(len(given[way]))
        accepted = Accepted(prefill)
        made[f"alone_{way}"] = await alone(prefill, given[way], "alone")
        made[f"share_{way}_alone"] = accepted.share(len(given[way]))
    made["without"] = await handed_over(prefill, plain, given["without"])
    last = given["sent"][-1]
    lost = {**last, "name": f"{last['name']}-lost", "lost_after": LOST_AFTER}
    made["recovered"] = await recovered(prefill, decode, lost)
    return made


async def run(given: dict[str, dict[str, list[cases.Case]]]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        is_latent = "mtp" in given
        make = draft_checkpoints.make_latent if is_latent else draft_checkpoints.make_llama
        model = make(directory / "model")
        drafts = {kind: speculation(kind, model, directory) for kind in given}

        @contextlib.asynccontextmanager
        async def started(name: str, kind: str = "", **engine_args: Any) -> AsyncIterator[Side]:
            if kind:
                engine_args["speculative_config"] = drafts[kind]
            # The cores of one engine's ranks must not bind another engine's.
            os.environ.pop(affinity.VLLM_BIND_THREADS, None)
            arguments = {**ENGINE_ARGS, **(LATENT_ARGS if is_latent else LLAMA_ARGS), **engine_args}
            async with side(model, 1, str(directory / f"{name}.sock"), **arguments) as one:
                yield one

        plain = await stack.enter_async_context(started("plain"))
        made: dict[str, Any] = {"plain_layers": plain.info.layout.num_all_layers}
        for kind, of_kind in given.items():
            if kind == "eagle":
                async with (
                    started("prefill", kind, host_bytes=2**23) as prefill,
                    started("decode", kind) as decode,
                ):
                    made[kind] = await compared(prefill, decode, plain, of_kind)
                    made["refused"] = await refused(decode)
                    made["reloaded"] = await reloaded(prefill, of_kind["sent"][-1])
                    made[kind]["left"] = await left_behind(prefill, decode, plain)
            else:
                # One engine hands over to itself, so its prefix cache must not have the prompts.
                async with started(kind, kind, enable_prefix_caching=False) as one:
                    made[kind] = await compared(one, one, plain, of_kind)
                    made[kind]["left"] = await left_behind(one, plain)
    return made


def main(given: dict[str, dict[str, list[cases.Case]]]) -> dict[str, Any]:
    fork_engines()
    return asyncio.run(run(given))
