"""Lets workers render chats with images: only engines have the model's image processor."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from baton.coordinator.state.requests import WorkerKey
from baton.coordinator.state.workers import AttachedWorkers, Worker
from baton.runtime.errors import Unavailable, from_message
from baton.v1 import cluster_pb2, common_pb2, inference_pb2

# Longest time until a chat is rendered, including the wait for a worker, and longest wait for the
# answer of one worker before another one gets the command.
_TIMEOUT_S, _ATTEMPT_S = 60.0, 15.0


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a chat, and where its images stand in it."""

    prompt_token_ids: array[int]
    images: Sequence[common_pb2.PromptImage]


class _WorkerGone(Exception):
    """The worker was lost before it answered."""


class Renders:
    """Render commands that workers have not answered yet. Not thread-safe.

    The callers bound the number of commands.

    Args:
        send: Sends a command to a worker.
    """

    def __init__(self, send: Callable[[WorkerKey, cluster_pb2.RenderCommand], None]) -> None:
        self._send = send
        self._waiting: dict[tuple[WorkerKey, int], asyncio.Future[cluster_pb2.Rendered]] = {}
        self._members_changed = asyncio.Event()

    async def render(
        self, chat: inference_pb2.ChatPrompt, workers: AttachedWorkers, max_pixels: int
    ) -> RenderedChat:
        """Returns the prompt of a chat. If the worker is lost meanwhile, another one renders it.

        Args:
            chat: A valid chat.
            workers: The workers that may compute the request.
            max_pixels: Limit of the images' decoded pixels, together.

        Raises:
            BatonError: The worker refuses the chat, or no worker has rendered it in time.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                rendered = await self._render(chat, workers, max_pixels)
        except TimeoutError:
            raise Unavailable(
                f"no worker has rendered the chat's images within {_TIMEOUT_S:g} s"
            ) from None
        if rendered.HasField("failed"):
            raise from_message(rendered.failed)
        return RenderedChat(array("I", rendered.prompt_token_ids[:]), list(rendered.images))

    async def _render(
        self, chat: inference_pb2.ChatPrompt, workers: AttachedWorkers, max_pixels: int
    ) -> cluster_pb2.Rendered:
        tries = Counter[WorkerKey]()
        while True:
            self._members_changed.clear()
            worker = self._least_busy(workers, tries)
            if worker is None:
                await self._members_changed.wait()
                continue
            tries[worker.key] += 1
            with contextlib.suppress(_WorkerGone, TimeoutError):
                async with asyncio.timeout(_ATTEMPT_S):
                    return await self._render_on(worker.key, chat, max_pixels)

    async def _render_on(
        self, worker: WorkerKey, chat: inference_pb2.ChatPrompt, max_pixels: int
    ) -> cluster_pb2.Rendered:
        render_id = secrets.randbits(63) | 1
        answered = asyncio.get_running_loop().create_future()
        self._waiting[worker, render_id] = answered
        try:
            command = cluster_pb2.RenderCommand(render_id=render_id, max_pixels=max_pixels)
            command.timeout.FromMicroseconds(round(_ATTEMPT_S * 1e6))
            command.chat.CopyFrom(chat)
            self._send(worker, command)
            rendered: cluster_pb2.Rendered = await answered
            if rendered.expired:
                raise _WorkerGone("the worker was too busy to render the chat")
            return rendered
        finally:
            del self._waiting[worker, render_id]

    def _least_busy(
        self, workers: AttachedWorkers, tries: Mapping[WorkerKey, int]
    ) -> Worker | None:
        """Returns a worker with the fewest tries, then a prefill worker with the fewest commands.

        Args:
            workers: The workers that may be asked.
            tries: How often each worker was asked to render the chat.
        """
        busy = Counter(key for key, _ in self._waiting)
        return min(
            (worker for worker in workers if worker.serving),
            key=lambda worker: (
                tries.get(worker.key, 0),
                worker.role != common_pb2.ROLE_PREFILL,
                busy[worker.key],
            ),
            default=None,
        )

    def on_members_changed(self) -> None:
        """Notes that workers came, left or changed."""
        self._members_changed.set()

    def on_report(self, worker: WorkerKey, rendered: cluster_pb2.Rendered) -> None:
        """Handles a worker's answer; ignores answers that no command waits for."""
        waiting = self._waiting.get((worker, rendered.render_id))
        if waiting is not None and not waiting.done():
            waiting.set_result(rendered)

    def lost(self, worker: WorkerKey, why: str) -> None:
        """Moves the commands of a lost worker to other workers."""
        for (key, _), waiting in self._waiting.items():
            if key == worker and not waiting.done():
                waiting.set_exception(_WorkerGone(why))
