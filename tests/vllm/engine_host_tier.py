"""Cases of a prefill and a decode engine that keep evicted blocks in host memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from baton.engine.base import EngineRequest
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.v1 import common_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import TIMEOUT_S, Side, hand_over

NUM_OUTPUTS = 40


def greedy(max_tokens: int = NUM_OUTPUTS) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def ask(one: Side, name: str, prompt: list[int], cache_salt: str = "") -> dict[str, Any]:
    request = EngineRequest(name, prompt, greedy(), cache_salt=cache_salt)
    tokens, first = await one.finish(request)
    return {
        "tokens": tokens,
        "num_cached": first.num_cached_tokens,
        "num_host": first.num_host_tokens,
        "num_disk": first.num_disk_tokens,
        "num_handoff": first.num_handoff_tokens,
    }


async def evict(one: Side, name: str) -> None:
    """Fills the whole cache with other prompts."""
    for n in range(4):
        await ask(one, f"{name}-{n}", cases.prompt(900, 1000 + 7 * n + len(name)))


async def conversation(one: Side, other: Side) -> dict[str, Any]:
    """Turns of one conversation; other prompts take the cache between them.

    Args:
        one: Engine that serves the conversation.
        other: Engine that computes the same prompts without anything kept.
    """
    prompt = cases.prompt(330, 81)
    made = {"first": await ask(one, "first", prompt)}
    await evict(one, "a")
    made["again"] = await ask(one, "again", prompt)
    await evict(one, "b")
    turn = [*prompt, *made["first"]["tokens"], *cases.prompt(50, 82)]
    made["next"] = await ask(one, "next", turn)
    made["next, cached"] = await ask(one, "next, cached", turn)
    made["next, computed"] = await ask(other, "next, computed", turn)
    await evict(one, "c")
    # Equal prompts that arrive together load the same blocks.
    both = await asyncio.gather(ask(one, "twin 1", turn), ask(one, "twin 2", turn))
    made["twin 1"], made["twin 2"] = both
    # All tokens of this prompt are stored; vLLM computes the last one to sample the next.
    whole = prompt[: 10 * cases.BLOCK_SIZE]
    await evict(one, "d")
    made["whole"] = await ask(one, "whole", whole)
    made["whole, computed"] = await ask(other, "whole, computed", whole)
    made["num_reported"] = sum(1 for each in hashes(turn) if each in one.in_host)
    # Another tenant finds nothing of it, on the device or in host memory.
    made["other tenant"] = await ask(one, "other tenant", turn, "search")
    made["other tenant again"] = await ask(one, "other tenant again", turn, "search")
    salted = hashes(turn, "search")
    made["num_reported_salted"] = sum(1 for each in salted if each in one.in_host)
    return made


def hashes(prompt: list[int], cache_salt: str = "") -> Sequence[int]:
    return block_hashes(prompt, cases.BLOCK_SIZE, root_of("", cache_salt))


async def handoffs(prefill: Side, decode: Side) -> dict[str, Any]:
    """A handoff whose blocks come from host memory, and one with a wrong block."""
    case = cases.greedy("computed", cases.prompt(330, 83), 12)
    made = {"computed": await hand_over(prefill, decode, case)}
    await evict(prefill, "e")
    await evict(decode, "f")
    made["from host"] = await hand_over(prefill, decode, {**case, "name": "from host"})
    spoiled = {**cases.greedy("spoiled", cases.prompt(340, 84), 12), "spoiled_rank": 0}
    made["spoiled"] = await hand_over(prefill, decode, spoiled)
    await evict(decode, "g")
    # Nothing of the wrong handoff may have been stored.
    made["after"] = await ask(decode, "after", spoiled["prompt"])
    made["right"] = await ask(prefill, "right", spoiled["prompt"])
    return made


async def taken_blocks(prefill: Side, decode: Side) -> dict[str, Any]:
    """A handoff gets the blocks of a prompt that has just ended, before host memory has them.

    Beside a stream and that prompt, the cache has no room for the handoff.
    """
    prompt, ends = cases.prompt(900, 85), list[asyncio.Task[Any]]()

    async def until_prompt_runs() -> None:
        ends.append(asyncio.create_task(decode.finish(EngineRequest("ends", prompt, greedy(1)))))
        while decode.engine.take_load().num_running < 2 and not ends[0].done():
            await asyncio.sleep(0.001)

    num_tokens = decode.counts["tokens"]
    beside = EngineRequest("beside", cases.prompt(900, 86), greedy(120))
    stream = asyncio.create_task(decode.finish(beside))
    while decode.counts["tokens"] == num_tokens:
        await asyncio.sleep(0.001)
    taker = cases.greedy("taker", cases.prompt(900, 87), 8)
    made: dict[str, Any] = {"taker": await hand_over(prefill, decode, taker, until_prompt_runs)}
    await asyncio.gather(stream, *ends)
    await evict(decode, "h")
    made["stored"] = await ask(decode, "stored", prompt)
    made["computed"] = await ask(prefill, "not stored", prompt)
    return made


async def host_tier(prefill: Side, decode: Side) -> dict[str, Any]:
    """Runs all cases and returns their results."""
    async with asyncio.timeout(TIMEOUT_S):
        made = {"conversation": await conversation(decode, prefill)}
        made["handoffs"] = await handoffs(prefill, decode)
        made["taken blocks"] = await taken_blocks(prefill, decode)
    return {
        **made,
        "host_kv_tokens": decode.info.host_kv_tokens,
        "num_in_host": [len(prefill.in_host), len(decode.in_host)],
    }
