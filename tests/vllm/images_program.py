"""Chats with images on two engines, and the answers of one plain vLLM."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import secrets
import tempfile
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM

from baton.engine import vllm_images
from baton.engine.base import EngineOutput, EngineRequest, Finish, RenderedPrompt
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.runtime.errors import InvalidArgument
from baton.runtime.process import affinity
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.prompts.prompt_images import block_keys
from baton.v1 import common_pb2, inference_pb2
from baton.worker.model_check import images_of
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import TIMEOUT_S, Side, left_behind, side
from tests.vllm.forked_engines import fork_engines
from tests.vllm.image_model import png, write_image_model
from tests.vllm.vllm_reference import ENGINE_ARGS, sampling_params

MAX_PIXELS = 2**20
# Three long answers do not fit into this cache at the same time.
SMALL_CACHE = {
    "max_model_len": 512,
    "kv_cache_memory_bytes": 20 * cases.BLOCK_SIZE * 3 * 2 * 64 * 4,
}


def chat(parts: Sequence[str | int], begun: str = "") -> inference_pb2.ChatPrompt:
    """Returns a chat with texts, and with images by their seeds; `begun` begins the answer."""
    made = inference_pb2.ChatPrompt()
    message = made.messages.add(role="user")
    for part in parts:
        if isinstance(part, int):
            message.parts.add(image=png(part))
        else:
            message.parts.add(text=part)
    if begun:
        made.messages.add(role="assistant", content=begun)
        made.add_generation_prompt, made.continue_final_message = False, True
    return made


def plain_answers(model: str, given: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the answers of one vLLM to chats in the form of OpenAI's API."""
    llm = LLM(model, limit_mm_per_prompt={"image": 2}, **ENGINE_ARGS)
    answers = []
    for case in given:
        content = [
            {"type": "image_url", "image_url": {"url": _data_url(part)}}
            if isinstance(part, int)
            else {"type": "text", "text": part}
            for part in case["parts"]
        ]
        answer = [{"role": "assistant", "content": case["begun"]}] if case["begun"] else []
        (made,) = llm.chat(
            [{"role": "user", "content": content}, *answer],
            sampling_params(case["sampling"]),
            use_tqdm=False,
            add_generation_prompt=not answer,
            continue_final_message=bool(answer),
        )
        tokens = list(made.outputs[0].token_ids)
        answers.append({"prompt": list(made.prompt_token_ids), "token_ids": tokens})
    llm.llm_engine.engine_core.shutdown()
    return answers


def _data_url(seed: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}"


def said(one: Side, prompt: RenderedPrompt) -> int:
    """Returns how many prompt tokens an engine's reports say are cached, by the prompt's hashes."""
    tokens, size = prompt.token_ids[:-1], one.info.layout.block_size_tokens
    keys = block_keys(prompt.images, 0, len(tokens), size)
    held = takewhile(one._cached.__contains__, block_hashes(tokens, size, image_keys=keys))
    return size * sum(1 for _ in held)


async def hand_over(
    prefill: Side,
    decode: Side,
    case: dict[str, Any],
    *,
    comes: bool = True,
    has_chat: bool = False,
    together: asyncio.Barrier | None = None,
) -> dict[str, Any]:
    """Runs one chat through both engines; only the first one gets the images.

    Args:
        prefill: Computes the prompt.
        decode: Gets its KV cache.
        case: The chat's parts, and sampling.
        comes: Whether the handoff is there in time.
        has_chat: Whether the second engine gets the images, too.
        together: Other chats that the second engine gets at the same time.
    """
    name, sampling = case["name"], common_pb2.SamplingParams(**case["sampling"])
    asked = chat(case["parts"], case["begun"])
    prompt = await prefill.engine.render(asked, MAX_PIXELS)
    known = case.get("known")
    # The first worker computes the known tokens too; the last one is computed by the second worker.
    token_ids = [*prompt.token_ids, *(known or [])[:-1]]
    size = len(token_ids)
    given = {"images": prompt.images, "sampling": sampling, "cache_salt": case.get("salt", "")}
    handoff_id = secrets.token_bytes(16)
    said_by_prefill = said(prefill, prompt)
    first = case.get("first")
    computed = None
    if comes:
        num_blocks = prefill.info.layout.num_blocks(size)
        offset = await prefill.transfer.open_send(
            handoff_id, decode.transfer.address, num_blocks, size, TIMEOUT_S
        )
        send = SendHandoff(handoff_id, offset, size)
        first, computed = await prefill.finish(
            EngineRequest(f"{name}-p", token_ids, prefill_only=True, send=send, chat=asked, **given)
        )
        first = known or first
        await decode.committed(handoff_id)
    if together is not None:
        await together.wait()
    receive = ReceiveHandoff(handoff_id, size, TIMEOUT_S if comes else 0.0)
    request = EngineRequest(
        f"{name}-d",
        prompt.token_ids,
        known_token_ids=first,
        receive=receive,
        chat=asked if has_chat else None,
        **given,
    )
    rest, last = await outputs_of(decode, request)
    return {
        "name": name,
        "prompt": list(prompt.token_ids),
        "ids": [image.id for image in prompt.images],
        "token_ids": first + rest,
        "finish": last.finish.value,
        "num_cached_by_prefill": computed.num_cached_tokens if computed else 0,
        "said_by_prefill": said_by_prefill,
        "num_cached_by_decode": last.num_cached_tokens,
        "num_loaded": last.num_handoff_tokens,
    }


async def outputs_of(one: Side, request: EngineRequest) -> tuple[list[int], EngineOutput]:
    """Returns the tokens of a request, and its end with the numbers of its first output."""
    outputs = one._outputs[request.engine_request_id] = asyncio.Queue()
    await one.engine.submit(request)
    tokens: list[int] = []
    num_loaded = num_cached = 0
    while True:
        output: EngineOutput = await outputs.get()
        tokens += output.token_ids
        num_loaded = num_loaded or output.num_handoff_tokens
        num_cached = num_cached or output.num_cached_tokens
        if output.finish is not None:
            output.num_handoff_tokens, output.num_cached_tokens = num_loaded, num_cached
            return tokens, output


async def refusals(one: Side) -> list[str]:
    """Returns why chats are refused."""
    broken = chat(["What?", 1])
    broken.messages[0].parts[1].image = png(1)[:200]
    found = []
    for asked, max_pixels in ((chat([1, 2]), 80 * 60 + 1), (broken, MAX_PIXELS)):
        try:
            await one.engine.render(asked, max_pixels)
        except InvalidArgument as error:
            found.append(str(error))
    return found


async def run(given: dict[str, Any]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        model = write_image_model(directory / "model")
        plain = await asyncio.to_thread(plain_answers, model, given["cases"])
        sides = []
        for socket, own in (("p.sock", {"kv_cache_memory_bytes": 2**23}), ("d.sock", SMALL_CACHE)):
            # The cores of one engine's ranks must not bind another engine's.
            os.environ.pop(affinity.VLLM_BIND_THREADS, None)
            begun = side(model, 1, str(directory / socket), max_num_seqs=4, **own)
            sides.append(await stack.enter_async_context(begun))
        prefill, decode = sides
        async with asyncio.timeout(2 * TIMEOUT_S):
            results = [await hand_over(prefill, decode, case) for case in given["cases"]]
            lost = {**given["cases"][0], "first": results[0]["token_ids"][:1]}
            without = await hand_over(prefill, decode, {**lost, "name": "lost"}, comes=False)
            with_chat = await hand_over(
                prefill, decode, {**lost, "name": "lost-again"}, comes=False, has_chat=True
            )
            # Its workers hold none of its blocks, like new ones.
            continued = next(case for case in given["cases"] if case["name"] == "two-images")
            known = {one["name"]: one["token_ids"] for one in results}["two-images"]
            known = known[: given["num_known"]]
            continued = {**continued, "name": "continued", "known": known, "salt": "continued"}
            recovered = await hand_over(prefill, decode, continued)
            # One answer must not end before another begins.
            together = asyncio.Barrier(len(given["crowd"]))
            crowd = await asyncio.gather(
                *(hand_over(prefill, decode, case, together=together) for case in given["crowd"])
            )
            left = await left_behind(prefill, decode)
            refused = await refusals(decode)
    takes = [one.info.model.takes_images for one in sides]
    config = prefill.engine._input.vllm_config
    told = [images_of(config)]
    with mock.patch.object(vllm_images, "COMPARED", ("Other",)):
        told.append(images_of(config))
    return {
        "plain": plain,
        "results": results,
        "lost": without,
        "lost_with_chat": with_chat,
        "recovered": recovered,
        "crowd": [(one["finish"], one["token_ids"]) for one in crowd],
        "left": left,
        "refused": refused,
        "takes_images": takes,
        "told_by_check": told,
        "aborted": Finish.ABORTED.value,
    }


def main(given: dict[str, Any]) -> dict[str, Any]:
    fork_engines()
    return asyncio.run(run(given))
