"""Renders chats with images for the coordinator."""

from __future__ import annotations

import asyncio

from baton.engine.base import Engine
from baton.runtime.durations import to_seconds
from baton.runtime.errors import InvalidArgument
from baton.runtime.network.rpc import MAX_MESSAGE_BYTES
from baton.v1 import cluster_pb2
from baton.worker.command_tasks import CommandTasks
from baton.worker.outbox import Outbox

# Size limit of an answer; the rest is for the fields around it.
_MAX_BYTES = MAX_MESSAGE_BYTES - 64


class Renders:
    """Executes commands one after the other; all methods are called from one event loop.

    The coordinator bounds the number of commands that it waits for. A command that waits here for
    longer than half of its timeout is answered without rendering: otherwise, a worker that falls
    behind would render only chats that the coordinator has already sent to other workers.

    Args:
        engine: Started engine.
        outbox: Queue for the answers.
    """

    def __init__(self, engine: Engine, outbox: Outbox) -> None:
        self._engine, self._outbox = engine, outbox
        # One command runs at a time, because decoded images take much memory.
        self._turn = asyncio.Lock()
        self._tasks = CommandTasks("render")

    def on_command(self, command: cluster_pb2.RenderCommand) -> None:
        """Starts to execute a command, or queues it behind earlier ones."""
        self._tasks.start(self._run(command))

    async def close(self) -> None:
        """Ends the commands before the engine is stopped."""
        await self._tasks.close()

    async def _run(self, command: cluster_pb2.RenderCommand) -> None:
        rendered = cluster_pb2.Rendered(render_id=command.render_id)
        try:
            async with asyncio.timeout(_start_within_s(command)):
                await self._turn.acquire()
        except TimeoutError:
            rendered.expired = True
            self._outbox.post(cluster_pb2.WorkerMessage(rendered=rendered))
            return
        try:
            try:
                prompt = await self._engine.render(command.chat, command.max_pixels)
            finally:
                self._turn.release()
            rendered.prompt_token_ids.extend(prompt.token_ids)
            rendered.images.extend(prompt.images)
            if (num_bytes := rendered.ByteSize()) > _MAX_BYTES:
                # gRPC would end the stream, and each later one, because the answer is sent again.
                rendered = cluster_pb2.Rendered(render_id=command.render_id)
                raise InvalidArgument(
                    "chat",
                    f"{len(prompt.token_ids)} tokens ({num_bytes} bytes)",
                    f"must be at most {_MAX_BYTES} bytes",
                )
        except Exception as error:
            rendered.failed.CopyFrom(self._tasks.failed(error))
        self._outbox.post(cluster_pb2.WorkerMessage(rendered=rendered))


def _start_within_s(command: cluster_pb2.RenderCommand) -> float | None:
    """Returns the longest time that a command may wait in the queue; None: no limit."""
    if not command.HasField("timeout"):
        return None
    # The other half is left for the rendering.
    return to_seconds(command.timeout) / 2
