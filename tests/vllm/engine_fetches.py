"""Cases of an engine that fetches the beginning of a prompt from another engine."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from pathlib import Path
from typing import Any

from baton.engine.base import EngineOutput, EngineRequest, Finish, cached_prefix_request
from baton.kvtransfer.engine_port import EnginePort, filled_frame
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.transfer_client import TransferClient
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_cases import FETCHED as HELD
from tests.vllm.engine_cases import NUM_FETCH_TOKENS as NUM_TOKENS
from tests.vllm.engine_handoffs import STAGING, TIMEOUT_S, Side, spoil
from tests.vllm.engine_host_tier import ask, evict, greedy


async def serve(
    holder: Side, reader: Side, handoff_id: bytes, prompt: list[int], num_tokens: int, skip: int = 0
) -> dict[str, Any]:
    """The holder sends what it has cached of a prompt, as worker/prefix_sends.py does.

    If it lacks all blocks, the reader is told to wait no longer, which is the coordinator's task.
    """
    size = holder.info.layout.num_blocks
    offset = await holder.transfer.open_send(
        handoff_id,
        reader.transfer.address,
        size(num_tokens - skip),
        num_tokens - skip,
        TIMEOUT_S,
    )

    async def send() -> EngineOutput:
        request = cached_prefix_request(
            f"prefix {handoff_id.hex()}",
            prompt[:num_tokens],
            send=SendHandoff(handoff_id, offset, num_tokens, skip),
        )
        _, first = await holder.finish(request)
        assert first.finish is not None
        return first

    first = await send()
    if first.num_held_tokens > skip:
        num_tokens = first.num_held_tokens
        offset = await holder.transfer.shrink_send(
            handoff_id, size(num_tokens - skip), num_tokens - skip
        )
        first = await send()
    if first.finish is not Finish.CUT:
        holder.transfer.abort_send(handoff_id)
        reader.transfer.drop(handoff_id)
    return {
        "finish": first.finish.value,
        "num_held": first.num_cached_tokens + first.num_host_tokens,
        "num_host": first.num_host_tokens,
    }


async def read(
    reader: Side, name: str, prompt: list[int], receive: ReceiveHandoff
) -> dict[str, Any]:
    tokens, first = await reader.finish(EngineRequest(name, prompt, greedy(), receive=receive))
    return {
        "tokens": tokens,
        "num_cached": first.num_cached_tokens,
        "num_host": first.num_host_tokens,
        "num_fetched": first.num_handoff_tokens,
    }


async def fetch(
    holder: Side,
    reader: Side,
    name: str,
    prompt: list[int],
    num_tokens: int = HELD,
    *,
    skip: int = 0,
    spoiled: bool = False,
) -> dict[str, Any]:
    """A request that waits for its prompt's beginning, which the other engine sends meanwhile."""
    handoff_id = secrets.token_bytes(16)
    receive = ReceiveHandoff(handoff_id, num_tokens, TIMEOUT_S, skip, is_fetch=True)
    if spoiled:
        sent = await serve(holder, reader, handoff_id, prompt, num_tokens, skip)
        await reader.committed(handoff_id)
        spoil(holder, reader, 0, reader.info.layout.num_blocks(num_tokens - skip))
        return {"sent": sent, **await read(reader, name, prompt, receive)}
    made, sent = await asyncio.gather(
        read(reader, name, prompt, receive),
        serve(holder, reader, handoff_id, prompt, num_tokens, skip),
    )
    return {"sent": sent, **made}


async def late_fetch(
    holder: Side, reader: Side, name: str, prompt: list[int], skip: int
) -> dict[str, Any]:
    """A fetch that comes only after other prompts have filled the reader's cache."""
    handoff_id = secrets.token_bytes(16)
    receive = ReceiveHandoff(handoff_id, HELD, TIMEOUT_S, skip, is_fetch=True)
    reading = asyncio.create_task(read(reader, name, prompt, receive))
    await evict(reader, f"before {name}")
    sent = await serve(holder, reader, handoff_id, prompt, HELD, skip)
    return {"sent": sent, **await reading}


async def own_blocks(reader: Side, name: str, prompt: list[int]) -> int:
    """Loads a prompt from host memory, as worker/own_blocks.py does; returns the loaded tokens."""
    _, first = await reader.finish(cached_prefix_request(name, prompt))
    return first.num_host_tokens


async def twins(holder: Side, reader: Side, prompt: list[int]) -> list[dict[str, Any]]:
    """A request with a fetch, and one that waits for the same fetch."""
    handoff_id = secrets.token_bytes(16)
    plans = [
        ReceiveHandoff(handoff_id, num_tokens, TIMEOUT_S, is_fetch=True) for num_tokens in (0, HELD)
    ]
    made = await asyncio.gather(
        *(read(reader, f"twin {n}", prompt, plan) for n, plan in enumerate(plans)),
        serve(holder, reader, handoff_id, prompt, HELD),
    )
    return list(made)


async def handed_on(holder: Side, reader: Side, prompt: list[int]) -> dict[str, Any]:
    """A prompt whose beginning is fetched, and whose KV cache is then handed over."""
    handoff_id, fetched_id = secrets.token_bytes(16), secrets.token_bytes(16)
    num_blocks = reader.info.layout.num_blocks(len(prompt))
    offset = await reader.transfer.open_send(
        handoff_id, holder.transfer.address, num_blocks, len(prompt), TIMEOUT_S
    )
    request = EngineRequest(
        "handed on-p",
        prompt,
        greedy(),
        prefill_only=True,
        send=SendHandoff(handoff_id, offset, len(prompt)),
        receive=ReceiveHandoff(fetched_id, HELD, TIMEOUT_S, is_fetch=True),
    )
    (first, computed), _ = await asyncio.gather(
        reader.finish(request), serve(holder, reader, fetched_id, prompt, HELD)
    )
    await evict(holder, "handed on")
    rest, loaded = await holder.finish(
        EngineRequest(
            "handed on-d",
            prompt,
            greedy(),
            known_token_ids=first,
            receive=ReceiveHandoff(handoff_id, len(prompt), TIMEOUT_S),
        )
    )
    return {
        "tokens": first + rest,
        "num_fetched": computed.num_handoff_tokens,
        "num_loaded": loaded.num_handoff_tokens,
    }


async def killed(reader: Side, prompt: list[int], socket_path: str) -> dict[str, Any]:
    """A fetch whose holder is killed when it has sent a part of the blocks."""
    handoff_id, layout = secrets.token_bytes(16), reader.info.layout
    holder = await TransferClient.start(STAGING, socket_path)
    try:
        await holder.configure(layout.fingerprint())
        offset = await holder.open_send(
            handoff_id, reader.transfer.address, layout.num_blocks(HELD), HELD, TIMEOUT_S
        )
        port = EnginePort(holder.socket_path)
        data = bytes(port.memory[offset : offset + layout.block_bytes])
        before = (await reader.transfer.stats()).frames_received
        port.send_frames([filled_frame(handoff_id, 0, 0, 0, 1, data)])
        port.close()
        receive = ReceiveHandoff(handoff_id, HELD, TIMEOUT_S, is_fetch=True)
        made = asyncio.create_task(read(reader, "killed", prompt, receive))
        while (await reader.transfer.stats()).frames_received == before:
            await asyncio.sleep(0.01)
        os.kill(holder.pid, signal.SIGKILL)
        return await made
    finally:
        await holder.close()


async def fetches(reader: Side, holder: Side, directory: Path) -> dict[str, Any]:
    """Runs all cases and returns their results."""
    made: dict[str, Any] = {}

    async def conversation(seed: int) -> tuple[list[int], list[int]]:
        """Returns a turn whose beginning the holder has, and the answer of an unsplit engine."""
        prompt = cases.prompt(NUM_TOKENS, seed)
        await ask(holder, f"turn {seed}", prompt)
        turn = [*prompt, *cases.prompt(60, seed + 1)]
        answer = await ask(holder, f"answer {seed}", turn)
        return turn, answer["tokens"]

    async with asyncio.timeout(TIMEOUT_S):
        turn, made["answer"] = await conversation(201)
        made["fetched"] = await fetch(holder, reader, "fetched", turn)
        made["cached"] = await ask(reader, "cached", turn)
        turn, made["answer, skipped"] = await conversation(211)
        await ask(reader, "beginning", turn[: 4 * cases.BLOCK_SIZE + 1])
        made["skipped"] = await fetch(holder, reader, "skipped", turn, skip=4 * cases.BLOCK_SIZE)
        turn, made["answer, from host"] = await conversation(221)
        await evict(holder, "fetch host")
        made["from host"] = await fetch(holder, reader, "from host", turn)
        turn, made["answer, beside host"] = await conversation(311)
        await ask(reader, "own beginning", turn[: 4 * cases.BLOCK_SIZE + 1])
        await evict(reader, "own host")
        num_own = await own_blocks(reader, "own", turn[: 4 * cases.BLOCK_SIZE])
        made["beside host"] = {
            "num_own": num_own,
            **await fetch(holder, reader, "beside host", turn, skip=4 * cases.BLOCK_SIZE),
        }
        turn, made["answer, late"] = await conversation(321)
        await ask(reader, "late beginning", turn[: 4 * cases.BLOCK_SIZE + 1])
        made["late"] = await late_fetch(holder, reader, "late", turn, 4 * cases.BLOCK_SIZE)
        turn, made["answer, spoiled"] = await conversation(231)
        made["spoiled"] = await fetch(holder, reader, "spoiled fetch", turn, spoiled=True)
        turn, made["answer, lost skip"] = await conversation(241)
        made["lost skip"] = await fetch(
            holder, reader, "lost skip", turn, skip=4 * cases.BLOCK_SIZE
        )
        turn, made["answer, twins"] = await conversation(251)
        made["twins"] = await twins(holder, reader, turn)
        turn, made["answer, handed on"] = await conversation(261)
        made["handed on"] = await handed_on(holder, reader, turn)
        turn, made["answer, killed"] = await conversation(291)
        made["killed"] = await killed(reader, turn, str(directory / "killed.sock"))
        # The holder has never seen this prompt, or only its first half.
        prompt = cases.prompt(NUM_TOKENS + 60, 271)
        made["never seen"] = await fetch(holder, reader, "never seen", prompt)
        made["answer, never seen"] = (await ask(holder, "answer 271", prompt))["tokens"]
        prompt = cases.prompt(NUM_TOKENS + 60, 281)
        await ask(holder, "half", prompt[: NUM_TOKENS // 2])
        made["half"] = await fetch(holder, reader, "half seen", prompt)
        made["answer, half"] = (await ask(holder, "answer 281", prompt))["tokens"]
        prompt = cases.prompt(NUM_TOKENS + 60, 301)
        await ask(holder, "host half", prompt[: NUM_TOKENS // 2])
        await evict(holder, "half host")
        await ask(reader, "block", prompt[: cases.BLOCK_SIZE + 1])
        made["half from host"] = await fetch(
            holder, reader, "half from host", prompt, skip=cases.BLOCK_SIZE
        )
        made["answer, half from host"] = (await ask(holder, "answer 301", prompt))["tokens"]
    return made
