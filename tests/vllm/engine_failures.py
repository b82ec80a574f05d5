"""Requests that vLLM's engine core cannot even begin with: what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any

import vllm_cases as cases
from engine_handoffs import Side
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.metrics.stats import SchedulerStats

from baton.engine.base import (
    EngineDead,
    EngineOutput,
    EngineRequest,
    Finish,
    ReceiveHandoff,
    SendHandoff,
)
from baton.kvtransfer.control import EnginePort
from baton.v1 import common_pb2

TIMEOUT_S, COMMIT_TIMEOUT_S = 60.0, 3600.0
SAMPLING = common_pb2.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


class Given:
    """What an engine's core was given, and what its scheduler was told of that.

    Attributes:
        fails: whether what is given from now on fails in the core's preprocessing.
        num_seen: requests that its scheduler will see.
        crossing: told by the core before anything else: that a request has failed which has ended.
        told: the last count of them.
    """

    def __init__(self, engine: Any) -> None:
        self.fails, self.num_seen, self.told = False, engine._num_submitted, 0
        failed = EngineCoreOutput("ended#0", [], finish_reason=FinishReason.ERROR)
        self.crossing = [EngineCoreOutputs(outputs=[failed], scheduler_stats=SchedulerStats())]
        self._get, engine._core.get_output_async = engine._core.get_output_async, self._gets
        self._add, self._note = engine._core.add_request_async, engine._notes.note
        engine._core.add_request_async, engine._notes.note = self._adds, self._notes

    async def _gets(self) -> EngineCoreOutputs:
        return self.crossing.pop() if self.crossing else await self._get()

    async def _adds(self, run: EngineCoreRequest) -> None:
        if self.fails:
            run.sampling_params = run.sampling_params.clone()
            # A request asserts that it has some.
            run.sampling_params.max_tokens = None
        else:
            self.num_seen += 1
        await self._add(run)

    def _notes(self, num: int, handoff_id: bytes = b"", token_ids: Sequence[int] = ()) -> bool:
        self.told = num
        return bool(self._note(num, handoff_id, token_ids))


async def outputs(decode: Side, request: EngineRequest) -> list[EngineOutput]:
    """All of a request that is submitted now."""
    queue = decode._outputs[request.request_id] = asyncio.Queue()
    await decode.engine.submit(request)
    found = [await queue.get()]
    while found[-1].finish is None:
        found.append(await queue.get())
    return found


async def pushed(decode: Side, given: Given, prompt: list[int]) -> dict[str, bool]:
    """A prompt that fails once, and is computed then, when its staging may be another's."""
    num_bytes = decode.info.layout.handoff_bytes(decode.info.layout.num_blocks(len(prompt)))
    send = SendHandoff(secrets.token_bytes(16), 0, len(prompt))
    queue = decode._outputs["sends"] = asyncio.Queue()
    given.fails = True
    await decode.engine.submit(
        EngineRequest("sends", prompt, SAMPLING, prefill_only=True, send=send)
    )
    given.fails = False
    output = await queue.get()
    port = EnginePort(decode.transfer.socket_path)
    is_written = any(port.memory[:num_bytes])
    port.close()
    return {"is_cut": output.finish is Finish.CUT, "is_written": is_written}


async def cut_off(decode: Side, waiting: EngineRequest) -> str:
    """What an engine says of the end of its transfer service, of which a request awaits news."""
    os.kill(decode.transfer.pid, signal.SIGKILL)
    await decode.transfer.gone.wait()
    await decode.engine.announce(waiting, 1)
    try:
        while True:
            await decode.engine.next_step()
    except EngineDead as error:
        return str(error)


@contextlib.asynccontextmanager
async def another_step(decode: Side) -> AsyncIterator[None]:
    """Ends once the engine has told of something again."""
    async with decode._stepped:
        until = decode._num_steps + 1
    yield
    async with decode._stepped:
        await decode._stepped.wait_for(lambda: decode._num_steps >= until)


async def announced_and_failed(decode: Side) -> dict[str, Any]:
    """What came of them; the engine has ended then."""
    prompt, made = cases.prompt(40, 4200), dict[str, Any]()
    given = Given(decode.engine)
    expected, _ = await decode.finish(EngineRequest("plain", prompt, SAMPLING))

    def announced(name: str) -> EngineRequest:
        """Of a handoff that never comes."""
        receive = ReceiveHandoff(secrets.token_bytes(16), len(prompt), COMMIT_TIMEOUT_S)
        return EngineRequest(name, prompt, SAMPLING, receive=receive)

    for name in ("heard of", "not heard of", "fails again"):
        request = announced(name)
        submitted = dataclasses.replace(request, known_token_ids=expected[:1])
        given.fails = True
        async with asyncio.timeout(TIMEOUT_S):
            if name == "not heard of":
                await decode.engine.announce(request, 1)
            else:
                async with another_step(decode):
                    await decode.engine.announce(request, 1)
            given.fails = name == "fails again"
            found = await outputs(decode, submitted)
        tokens = [token for one in found for token in one.token_ids]
        made[name] = {
            "is_right": expected[:1] + tokens == expected,
            "is_error": found[-1].finish is Finish.ERROR,
        }
    given.fails = False
    async with asyncio.timeout(TIMEOUT_S):
        made["pushed"] = await pushed(decode, given, prompt)
    # One that waits makes the scheduler be told of all.
    await decode.engine.announce(announced("waits"), 1)
    made["num_unseen"] = given.told - given.num_seen
    made["num_untold"] = len(given.crossing)
    await decode.engine.abort(["waits"])
    async with asyncio.timeout(TIMEOUT_S):
        made["cut off"] = await cut_off(decode, announced("in vain"))
    return made
