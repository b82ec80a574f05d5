"""Requests before the first: what is slow once must not be slow for a client."""

from __future__ import annotations

from baton.engine.base import Engine, EngineDead, EngineInfo, EngineRequest, Finish, RequestRejected
from baton.v1 import common_pb2

# Of its prompt: enough for the kernels of a real one, and soon computed without a GPU.
_MAX_TOKENS = 512
# Its tokens follow each other as no prompt's do: it is in nobody's way in the prefix cache.
_STRIDE = 7919
_NAME = "warm-up"


async def warm_up(engine: Engine, info: EngineInfo) -> None:
    """Runs a prompt and, where they fit, two output tokens through a started engine.

    The same again with each adapter. Nobody else may use the engine meanwhile.

    Raises:
        EngineDead: it cannot.
    """
    for adapter in ("", *(one.name for one in info.model.adapters)):
        await _run(engine, _request(info, adapter), f"warm-up of {adapter}" if adapter else _NAME)
    # What these steps took is no measure of others.
    engine.load()


def _request(info: EngineInfo, adapter: str) -> EngineRequest:
    model = info.model
    room = min(model.max_model_len, info.kv_tokens)
    num_outputs = min(2, room - 1)
    # Of a small cache half: an engine may keep room free beside a prompt, for drafts say, and what
    # does not fit waits for ever.
    fits = max(1, (room - num_outputs) // 2)
    num_prompt = min(_MAX_TOKENS, info.max_num_batched_tokens, fits)
    return EngineRequest(
        _NAME,
        [position * _STRIDE % model.vocab_size for position in range(num_prompt)],
        common_pb2.SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True),
        adapter=adapter,
    )


async def _run(engine: Engine, request: EngineRequest, what: str) -> None:
    try:
        await engine.submit(request)
    except RequestRejected as error:
        raise EngineDead(f"{what}: {error}") from error
    while True:
        for output in (await engine.next_step()).outputs:
            if output.finish is Finish.ERROR:
                raise EngineDead(f"{what}: {output.error}")
            if output.finish is not None:
                return
