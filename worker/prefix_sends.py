"""Sends cached prefixes of prompts to other workers, which fetch them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from time import monotonic
from typing import Any

from baton.engine.base import (
    Engine,
    EngineDead,
    EngineOutput,
    Finish,
    RequestRejected,
    cached_prefix_request,
)
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.runtime.durations import to_seconds
from baton.runtime.kv.fetches import tokens_to_send
from baton.v1 import cluster_pb2
from baton.worker.sends import Send, Sends

_log = logging.getLogger(__name__)


class PrefixSends:
    """Executes SendPrefixCommands; all methods are called from one event loop.

    A command ends when the engine has filled the staging of its handoff. Sends owns the handoff
    then, and reports the end of each handoff.

    Args:
        engine: Started engine.
        sends: Handoffs from this worker.
        block_size_tokens: Tokens per KV block.
        on_end: Called when a command has ended.
        on_engine_dead: Called with the reason when the engine has failed.

    Attributes:
        num_ended: Ended commands by outcome.
    """

    def __init__(
        self,
        engine: Engine,
        sends: Sends,
        block_size_tokens: int,
        *,
        on_end: Callable[[], None],
        on_engine_dead: Callable[[str], None],
    ) -> None:
        self._engine, self._sends, self._block_size_tokens = engine, sends, block_size_tokens
        self._on_end, self._on_engine_dead = on_end, on_engine_dead
        # By handoff ID: the task of each command, and a future that stops the task.
        self._tasks: dict[bytes, asyncio.Task[bool]] = {}
        self._stops: dict[bytes, asyncio.Future[None]] = {}
        # The engine's requests, by the engine's request ID.
        self._waiting: dict[str, asyncio.Future[EngineOutput]] = {}
        self.num_ended: Counter[str] = Counter()

    def __len__(self) -> int:
        """Number of commands that have not ended."""
        return len(self._tasks)

    @property
    def handoff_ids(self) -> set[bytes]:
        """Handoffs whose staging the engine may still write."""
        return set(self._tasks)

    def start(self, command: cluster_pb2.SendPrefixCommand) -> None:
        """Starts to execute a command."""
        handoff_id = command.handoff.handoff_id
        self._sends.add(Send(command.handoff, command.traceparent))
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(command, stop), name=_engine_request_id(handoff_id))
        self._tasks[handoff_id], self._stops[handoff_id] = task, stop
        task.add_done_callback(lambda task: self._on_done(handoff_id, task))

    def refuse(self, command: cluster_pb2.SendPrefixCommand) -> None:
        """Reports that this worker does not execute a command."""
        self._sends.add(Send(command.handoff, command.traceparent))
        self._sends.release(command.handoff.handoff_id)

    def cancel(self, handoff_id: bytes) -> None:
        """Stops to send a prefix; unknown IDs and ended sends are ignored."""
        if (stop := self._stops.get(handoff_id)) is None:
            self._sends.abort(handoff_id)
        elif not stop.done():
            stop.set_result(None)

    def cancel_all(self) -> None:
        """Ends all commands."""
        for handoff_id in self._stops:
            self.cancel(handoff_id)

    def tasks(self) -> list[asyncio.Task[bool]]:
        """Returns the tasks of the commands that have not ended."""
        return list(self._tasks.values())

    def take(self, output: EngineOutput) -> None:
        """Handles an output of the engine; ignores outputs that do not end a request from here."""
        ended = self._waiting.get(output.engine_request_id)
        if ended is not None and not ended.done() and output.finish is not None:
            ended.set_result(output)

    def _on_done(self, handoff_id: bytes, task: asyncio.Task[bool]) -> None:
        del self._tasks[handoff_id], self._stops[handoff_id]
        is_sent = not task.cancelled() and task.result()
        if not is_sent:
            self._sends.release(handoff_id)
        self.num_ended["prefix_sent" if is_sent else "prefix_not_sent"] += 1
        self._on_end()

    async def _run(
        self, command: cluster_pb2.SendPrefixCommand, stop: asyncio.Future[None]
    ) -> bool:
        """Returns whether the engine has filled the staging; otherwise it no longer writes there.

        This task is not cancelled, because the staging is freed when it ends.
        """
        handoff_id, timeout_s = command.handoff.handoff_id, to_seconds(command.timeout)
        sending = asyncio.create_task(self._send(command))
        ends: list[asyncio.Future[Any]] = [sending, stop]
        await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        try:
            if not sending.done():
                sending.cancel()
                await asyncio.wait([sending])
                await self._engine.abort([_engine_request_id(handoff_id)])
            is_sent = not sending.cancelled() and sending.result()
            return is_sent and not stop.done()
        except (RequestRejected, TransferError):
            # Sends reports the end of the handoff.
            pass
        except EngineDead as error:
            self._on_engine_dead(str(error))
        except Exception:
            _log.exception("prefix %s could not be sent", handoff_id.hex())
        return False

    async def _send(self, command: cluster_pb2.SendPrefixCommand) -> bool:
        """Lets the engine fill the staging; returns False if the engine lacks blocks."""
        plan, due_at = command.handoff, monotonic() + to_seconds(command.timeout)
        output = await self._fill(command, await self._sends.reserve(plan), due_at)
        if output.finish is Finish.PREFIX_GONE:
            held = tokens_to_send(plan, output.num_held_tokens, self._block_size_tokens)
            if not held:
                return False
            # The prefix is shortened once. If the cache loses another block, nothing is sent.
            output = await self._fill(command, await self._sends.shrink(plan, held), due_at)
        return output.finish is Finish.CUT

    async def _fill(
        self, command: cluster_pb2.SendPrefixCommand, send: SendHandoff, due_at: float
    ) -> EngineOutput:
        """Runs one request of the engine that fills the staging of a handoff."""
        request = cached_prefix_request(
            _engine_request_id(send.handoff_id),
            command.prompt_token_ids[: send.num_tokens],
            send=send,
            priority=command.priority,
            adapter=command.adapter,
            cache_salt=command.cache_salt,
            images=command.images,
            due_in_s=due_at - monotonic(),
        )
        ended: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        self._waiting[request.engine_request_id] = ended
        try:
            await self._engine.submit(request)
            return await ended
        finally:
            del self._waiting[request.engine_request_id]


def _engine_request_id(handoff_id: bytes) -> str:
    return f"prefix {handoff_id.hex()}"
