"""Drives one push: batches from the sender to the transport, replies back to the sender."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.push import Push, PushLost
from baton.kvtransfer.service.sender import Sender
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2

# Longest time for the last frame of a push that ends; then the push is cancelled.
FAREWELL_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Pusher:
    """Owns one push and its two tasks: one writes batches, the other reads replies.

    Args:
        handoff_id: ID of the handoff.
        sender: The state machine that gives out the batches.
        ready: Waited for before the push is opened: a receiver soon ends a push without an open.
        open_push: Opens the push.
        on_reply: Called with each reply of the receiver.
        on_lost: Called once with the reason when the push has ended, also after `stop`.
    """

    def __init__(
        self,
        handoff_id: bytes,
        sender: Sender,
        ready: Callable[[], Awaitable[None]],
        open_push: Callable[[], Push],
        on_reply: Callable[[kv_transfer_pb2.PushReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._handoff_id, self._sender = handoff_id, sender
        self._ready, self._open_push = ready, open_push
        self._on_reply = on_reply
        self._push: Push | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._farewell: bytes | None = None
        # Why the writing task failed, and why the push ended.
        self._problem, self._detail = "", "the push was stopped"
        self._cut_off: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())
        # A callback, because the task may be cancelled before it begins.
        self._task.add_done_callback(lambda _: on_lost(self._detail))

    def wake(self) -> None:
        """Tells the writing task that a batch may be ready."""
        self._changed.set()

    def stop(self, farewell: bytes | None) -> None:
        """Sends no more batches; sends the farewell frame and ends, with a timeout."""
        self._stopping, self._farewell = True, farewell
        if self._push is None:
            # The push is not open yet, so there is no receiver to tell.
            self._task.cancel()
            return
        self._changed.set()
        loop = asyncio.get_running_loop()
        self._cut_off = loop.call_later(FAREWELL_TIMEOUT_S, self._push.cancel)

    async def close(self) -> None:
        """Cancels the push and waits for the tasks."""
        if self._push is not None:
            self._push.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._ready()
            self._push = push = self._open_push()
        except Exception:
            logger.exception("a push could not be opened")
            self._detail = "internal error"
            return
        writer = asyncio.create_task(self._write(push))
        self._detail = "the receiver ended the push before the commit"
        try:
            while (reply := await push.receive()) is not None:
                self._on_reply(reply)
        except PushLost as error:
            self._detail = self._problem or str(error)
        except Exception:
            logger.exception("push failed")
            self._detail = "internal error"
        finally:
            writer.cancel()
            push.cancel()
            if self._cut_off is not None:
                self._cut_off.cancel()
            await asyncio.wait([writer])

    async def _write(self, push: Push) -> None:
        try:
            while not self._stopping:
                batch = self._sender.next_batch(
                    self._handoff_id, frames.FRAME_TARGET_BYTES, time.monotonic()
                )
                if batch is None:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                await push.send(batch)
                self._sender.handle_written(self._handoff_id, time.monotonic())
            if self._farewell is not None:
                await push.send([OutgoingFrame(self._farewell, memoryview(b""))])
            await push.finish()
        except PushLost:
            # The reading task reports the reason, with the receiver's words if there are any.
            pass
        except TransferRefused as error:
            self._problem = str(error)
            push.cancel()
        except Exception:
            logger.exception("push failed")
            push.cancel()
