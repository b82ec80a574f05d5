"""Warm-up requests, so that one-time costs do not delay the first client."""

from __future__ import annotations

from baton.engine.base import (
    Engine,
    EngineDead,
    EngineInfo,
    EngineRequest,
    EngineStep,
    Finish,
    RequestRejected,
)
from baton.v1 import common_pb2

# Prompt tokens: enough to compile the kernels of a real prompt, and quick to compute on a CPU.
_MAX_TOKENS = 512
# Real prompts never have these tokens in this order, so their cached blocks match no prompt.
_STRIDE = 7919
_NAME = "warm-up"


def is_warm_up(engine_request_id: str) -> bool:
    """Whether a request of this ID, or of an engine's own ID made of it, is one of the warm-up."""
    return engine_request_id == _NAME or engine_request_id.startswith(f"{_NAME}#")


async def warm_up(engine: Engine, info: EngineInfo) -> list[EngineStep]:
    """Runs a prompt, and two output tokens if they fit, with the model and each adapter.

    The engine must have no other requests meanwhile.

    Returns:
        The engine's steps. With the first steps, an engine reports the blocks that an earlier
        worker has left on disk.

    Raises:
        EngineDead: The engine has failed.
    """
    steps: list[EngineStep] = []
    for adapter in ("", *(one.name for one in info.model.adapters)):
        what = f"warm-up of {adapter}" if adapter else _NAME
        steps += await _run(engine, _request(info, adapter), what)
    # Drop the samples: warm-up steps would distort the latency model.
    engine.take_load()
    return steps


def _request(info: EngineInfo, adapter: str) -> EngineRequest:
    model = info.model
    room = min(model.max_model_len, info.kv_tokens)
    num_outputs = min(2, room - 1)
    # Use at most half of a small cache: an engine may keep room free beside a prompt, for example
    # for drafts, and a prompt that does not fit waits forever.
    fits = max(1, (room - num_outputs) // 2)
    num_prompt = min(_MAX_TOKENS, info.max_num_batched_tokens, fits)
    return EngineRequest(
        _NAME,
        [position * _STRIDE % model.vocab_size for position in range(num_prompt)],
        common_pb2.SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


async def _run(engine: Engine, request: EngineRequest, what: str) -> list[EngineStep]:
    try:
        await engine.submit(request)
    except RequestRejected as error:
        raise EngineDead(f"{what}: {error}") from error
    steps: list[EngineStep] = []
    while True:
        steps.append(await engine.next_step())
        for output in steps[-1].outputs:
            if output.finish is Finish.ERROR:
                raise EngineDead(f"{what}: {output.error}")
            if output.finish is not None:
                return steps
