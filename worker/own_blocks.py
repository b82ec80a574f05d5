"""Loads a worker's own KV blocks from host memory before a fetch of the blocks after them."""

from __future__ import annotations

import asyncio
from time import monotonic

from baton.engine.base import Engine, EngineOutput, cached_prefix_request
from baton.runtime.durations import to_seconds
from baton.worker.attempts import Attempt


class OwnBlocks:
    """Owns the engine requests that load blocks from host memory into the prefix cache.

    Such a load is an engine request of its own. The request that waits for the fetch holds the
    blocks from its own submission on (KeptPrefixes). If the blocks are evicted before that, the
    engine computes the prompt.

    Args:
        engine: Started engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loads: dict[str, asyncio.Future[EngineOutput]] = {}

    async def load(self, attempt: Attempt) -> None:
        """Loads the blocks that a fetch leaves out and that are not on the device.

        Raises:
            RequestRejected: The engine does not accept the request.
            EngineDead: The engine has failed.
        """
        plan = attempt.fetch
        if plan is None or not plan.host_tokens:
            return
        request = cached_prefix_request(
            f"{attempt.engine_request_id}.own",
            attempt.spec.prompt_token_ids[: plan.skip_tokens],
            priority=attempt.spec.priority,
            adapter=attempt.spec.adapter,
            cache_salt=attempt.spec.cache_salt,
        )
        begun_at = monotonic()
        ended = self._loads[request.engine_request_id] = asyncio.get_running_loop().create_future()
        try:
            await self._engine.submit(request)
            async with asyncio.timeout(to_seconds(plan.timeout)):
                attempt.num_own_host_tokens = (await ended).num_host_tokens
        except TimeoutError:
            await self._engine.abort([request.engine_request_id])
        except asyncio.CancelledError:
            await self._engine.abort([request.engine_request_id])
            raise
        finally:
            del self._loads[request.engine_request_id]
            attempt.own_load_s = monotonic() - begun_at

    def take(self, output: EngineOutput) -> None:
        """Handles an output of the engine; ignores outputs that do not end a load."""
        ended = self._loads.get(output.engine_request_id)
        if ended is not None and not ended.done() and output.finish is not None:
            ended.set_result(output)
