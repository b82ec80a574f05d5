"""Requests that fail in vLLM's engine core before its scheduler gets them."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from typing import Any

from vllm.v1.engine import EngineCoreRequest

from baton.engine.base import EngineDead, EngineOutput, EngineRequest, Finish
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.v1 import common_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import Side

TIMEOUT_S, COMMIT_TIMEOUT_S = 120.0, 3600.0
SAMPLING = common_pb2.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Failing:
    """Makes an engine core's next requests fail in its preprocessing.

    Attributes:
        num_left: Number of requests that still fail.
    """

    def __init__(self, engine: Any) -> None:
        self.num_left = 0
        self._add = engine._core.add_request_async
        engine._core.add_request_async = self._adds

    async def _adds(self, run: EngineCoreRequest) -> None:
        if self.num_left:
            self.num_left -= 1
            run.sampling_params = run.sampling_params.clone()
            # vLLM's Request asserts that max_tokens is set.
            run.sampling_params.max_tokens = None
        await self._add(run)


async def outputs(decode: Side, request: EngineRequest) -> list[EngineOutput]:
    """Submits a request and returns all its outputs."""
    queue = decode._outputs[request.engine_request_id] = asyncio.Queue()
    await decode.engine.submit(request)
    found = [await queue.get()]
    while found[-1].finish is None:
        found.append(await queue.get())
    return found


async def sent(decode: Side, failing: Failing, prompt: list[int]) -> dict[str, bool]:
    """A prefill that fails once: its second run must not write to the send's staging."""
    num_bytes = decode.info.layout.handoff_bytes(decode.info.layout.num_blocks(len(prompt)))
    send = SendHandoff(secrets.token_bytes(16), 0, len(prompt))
    failing.num_left = 1
    request = EngineRequest("sends", prompt, SAMPLING, prefill_only=True, send=send)
    port = EnginePort(decode.transfer.socket_path)
    # Earlier sends have left their bytes there, and nothing owns the staging now.
    port.memory[:num_bytes] = bytes(num_bytes)
    output, *_ = await outputs(decode, request)
    is_written = any(port.memory[:num_bytes])
    port.close()
    return {"is_cut": output.finish is Finish.CUT, "is_written": is_written}


async def cut_off(decode: Side, waiting: EngineRequest) -> str:
    """Returns the engine's error when its transfer service ends while a request waits."""
    os.kill(decode.transfer.pid, signal.SIGKILL)
    await decode.transfer.gone.wait()
    await decode.engine.submit(waiting)
    try:
        while True:
            await decode.engine.next_step()
    except EngineDead as error:
        return str(error)


async def failures(decode: Side) -> dict[str, Any]:
    """Runs all cases; the last one ends the engine."""
    prompt, made = cases.prompt(40, 4200), dict[str, Any]()
    failing = Failing(decode.engine)
    expected, _ = await decode.finish(EngineRequest("plain", prompt, SAMPLING))

    def waiting(name: str) -> EngineRequest:
        """A request whose handoff never comes."""
        receive = ReceiveHandoff(secrets.token_bytes(16), len(prompt), COMMIT_TIMEOUT_S)
        sampling = common_pb2.SamplingParams()
        sampling.CopyFrom(SAMPLING)
        return EngineRequest(name, prompt, sampling, known_token_ids=expected[:1], receive=receive)

    async with asyncio.timeout(TIMEOUT_S):
        for num_failures, name in ((1, "fails once"), (2, "fails twice")):
            failing.num_left = num_failures
            found = await outputs(decode, waiting(name))
            tokens = [token for one in found for token in one.token_ids]
            made[name] = {
                "is_right": expected[:1] + tokens == expected,
                "is_error": found[-1].finish is Finish.ERROR,
            }
    async with asyncio.timeout(TIMEOUT_S):
        failing.num_left = 1
        request = waiting("with prompt logprobs")
        request.sampling.prompt_logprobs = 2
        found = await outputs(decode, request)
        made["prompt logprobs"] = {
            "is_right": expected[:1] + [token for one in found for token in one.token_ids]
            == expected,
            "num_rows": sum(len(one.prompt_logprobs) for one in found),
        }
    async with asyncio.timeout(TIMEOUT_S):
        made["sent"] = await sent(decode, failing, prompt)
    async with asyncio.timeout(TIMEOUT_S):
        made["cut off"] = await cut_off(decode, waiting("in vain"))
    return made
