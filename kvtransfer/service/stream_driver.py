"""Drives the stream of one send: writes the sender's batches, and gives it the replies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.service.handoff_stream import OutgoingStream, StreamLost
from baton.kvtransfer.service.sender import Sender
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.v1 import kv_transfer_pb2

# Longest time for the last frame of a stream that ends; then the stream is cancelled.
FAREWELL_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class StreamDriver:
    """Owns the stream of one send and its two tasks: one writes batches, the other reads replies.

    Args:
        handoff_id: ID of the handoff.
        sender: The state machine that gives out the batches.
        ready: Waited for before the stream is opened: a receiver soon ends a stream without an
            open.
        open_stream: Opens the stream.
        on_reply: Called with each reply of the receiver.
        on_lost: Called once with the reason when the stream has ended, also after `stop`.
    """

    def __init__(
        self,
        handoff_id: bytes,
        sender: Sender,
        ready: Callable[[], Awaitable[None]],
        open_stream: Callable[[], OutgoingStream],
        on_reply: Callable[[kv_transfer_pb2.HandoffReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._handoff_id, self._sender = handoff_id, sender
        self._ready, self._open_stream = ready, open_stream
        self._on_reply = on_reply
        self._stream: OutgoingStream | None = None
        self._changed = asyncio.Event()
        self._stopping = False
        self._farewell: bytes | None = None
        # Why the writing task failed, and why the stream ended.
        self._problem, self._detail = "", "the stream was stopped"
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
        if self._stream is None:
            # The stream is not open yet, so there is no receiver to tell.
            self._task.cancel()
            return
        self._changed.set()
        loop = asyncio.get_running_loop()
        self._cut_off = loop.call_later(FAREWELL_TIMEOUT_S, self._stream.cancel)

    async def close(self) -> None:
        """Cancels the stream and waits for the tasks."""
        if self._stream is not None:
            self._stream.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._ready()
            self._stream = stream = self._open_stream()
        except Exception:
            logger.exception("the stream of a handoff could not be opened")
            self._detail = "internal error"
            return
        writer = asyncio.create_task(self._write(stream))
        self._detail = "the receiver ended the stream before the commit"
        try:
            while (reply := await stream.receive()) is not None:
                self._on_reply(reply)
        except StreamLost as error:
            self._detail = self._problem or str(error)
        except Exception:
            logger.exception("the stream of a handoff failed")
            self._detail = "internal error"
        finally:
            writer.cancel()
            stream.cancel()
            if self._cut_off is not None:
                self._cut_off.cancel()
            await asyncio.wait([writer])

    async def _write(self, stream: OutgoingStream) -> None:
        try:
            while not self._stopping:
                batch = self._sender.next_batch(
                    self._handoff_id, frames.FRAME_TARGET_BYTES, time.monotonic()
                )
                if batch is None:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                await stream.send(batch)
                self._sender.handle_written(self._handoff_id, time.monotonic())
            if self._farewell is not None:
                await stream.send([OutgoingFrame(self._farewell, memoryview(b""))])
            await stream.finish()
        except StreamLost:
            # The reading task reports the reason, with the receiver's words if there are any.
            pass
        except TransferRefused as error:
            self._problem = str(error)
            stream.cancel()
        except Exception:
            logger.exception("the stream of a handoff failed")
            stream.cancel()
