"""A request of the worker's own, before anybody's: a prompt and a decode step through the engine.

What an engine allocates or compiles at its first steps is then done, and what those steps took is
told to nobody.
"""

from __future__ import annotations

import asyncio
import logging

from baton.engine.base import Engine, EngineDead, EngineInfo, EngineRequest, Finish, RequestRejected
from baton.v1 import common_pb2

_log = logging.getLogger(__name__)

_ID = "warm-up"
_MOST_TOKENS = 16
# In every vocabulary.
_TOKEN = 1


async def warm_up(engine: Engine, info: EngineInfo, timeout_s: float) -> None:
    """Runs it; the engine has nothing else.

    It fills no block of KV cache, so that no prefix cache keeps it.

    Raises:
        EngineDead: it fails, or takes longer than `timeout_s`.
    """
    num_tokens = max(1, min(_MOST_TOKENS, info.layout.block_size_tokens) - 3)
    sampling = common_pb2.SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = EngineRequest(_ID, [_TOKEN] * num_tokens, sampling)
    try:
        async with asyncio.timeout(timeout_s):
            await engine.submit(request)
            while not await _ended(engine):
                pass
    except RequestRejected as error:
        _log.warning("no warm-up: %s", error)
    except TimeoutError:
        raise EngineDead(f"its first steps took more than {timeout_s:g} s") from None
    # Its steps are no measure of those that follow.
    engine.load()


async def _ended(engine: Engine) -> bool:
    step = await engine.next_step()
    for output in step.outputs:
        if output.request_id == _ID and output.finish is not None:
            if output.finish is Finish.ERROR:
                raise EngineDead(f"its first steps failed: {output.error}")
            return True
    return False
