"""Renders chats with images for the coordinator."""

from __future__ import annotations

import asyncio
import logging

from google.rpc import code_pb2

from baton.engine.base import Engine, EngineDead
from baton.runtime.errors import BatonError, Internal, RemoteError, to_message
from baton.v1 import cluster_pb2
from baton.worker.outbox import Outbox

_log = logging.getLogger(__name__)

_CLOSE_S = 1.0


class Renders:
    """Carries out commands one after the other; all methods are called from one event loop.

    The coordinator bounds the number of commands that wait.

    Args:
        engine: Started engine.
        outbox: Queue for the answers.
    """

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self._engine, self._outbox = engine, outbox
        # Decoded images are large.
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def on_command(self, command: cluster_pb2.RenderCommand) -> None:
        """Begins to carry out a command."""
        task = asyncio.create_task(self._run(command), name="render")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Ends the commands before the engine is stopped."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)

    async def _run(self, command: cluster_pb2.RenderCommand) -> None:
        rendered = cluster_pb2.Rendered(render_id=command.render_id)
        try:
            async with self._turn:
                prompt = await self._engine.render(command.chat, command.max_pixels)
            rendered.prompt_token_ids.extend(prompt.token_ids)
            rendered.images.extend(prompt.images)
        except BatonError as error:
            rendered.failed.CopyFrom(to_message(error))
        except EngineDead as error:
            gone = RemoteError(code_pb2.UNAVAILABLE, str(error), [])
            rendered.failed.CopyFrom(to_message(gone))
        except Exception as error:
            _log.exception("render")
            rendered.failed.CopyFrom(to_message(Internal(f"{type(error).__name__}: {error}")))
        self._outbox.post(cluster_pb2.WorkerMessage(rendered=rendered))
