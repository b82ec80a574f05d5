"""One request before the first: what is slow once must not be slow for a client."""

from __future__ import annotations

from baton.engine.base import Engine, EngineDead, EngineInfo, EngineRequest, Finish, RequestRejected
from baton.v1 import common_pb2

# Of its prompt: enough for the kernels of a real one, and soon computed without a GPU.
_MAX_TOKENS = 512
# Its tokens follow each other as no prompt's do: it is in nobody's way in the prefix cache.
_STRIDE = 7919


async def warm_up(engine: Engine, info: EngineInfo) -> None:
    """Runs a prompt and, where they fit, two output tokens through a started engine.

    Nobody else may use the engine meanwhile.

    Raises:
        EngineDead: it cannot.
    """
    model = info.model
    room = min(model.max_model_len, info.kv_tokens)
    num_outputs = min(2, room - 1)
    # Of a small cache half: an engine may keep room free beside a prompt, for drafts say, and what
    # does not fit waits for ever.
    fits = max(1, (room - num_outputs) // 2)
    num_prompt = min(_MAX_TOKENS, info.max_num_batched_tokens, fits)
    request = EngineRequest(
        "warm-up",
        [position * _STRIDE % model.vocab_size for position in range(num_prompt)],
        common_pb2.SamplingParams(max_tokens=num_outputs, temperature=0.0, ignore_eos=True),
    )
    try:
        await engine.submit(request)
    except RequestRejected as error:
        raise EngineDead(f"warm-up: {error}") from error
    while True:
        for output in (await engine.next_step()).outputs:
            if output.finish is Finish.ERROR:
                raise EngineDead(f"warm-up: {output.error}")
            if output.finish is not None:
                # What these steps took is no measure of others.
                engine.load()
                return
