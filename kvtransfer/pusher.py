"""Drives one send: batches from the state machine to the transport, replies back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.link_store import LinkLost
from baton.kvtransfer.sender import Sender
from baton.kvtransfer.sending import Outgoing
from baton.kvtransfer.transport import Push, PushLost
from baton.v1 import kv_transfer_pb2

# A push that is over has so long to say so; then it is cut off.
FAREWELL_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Pusher:
    """One push and its two tasks; it owns both.

    Args:
        ready: waited for before anything is sent.
        send_by_link: sends frames beside the push; raises LinkLost.
        on_reply: the receiver answered.
        on_lost: the push ended; called once, also after `stop`.
    """

    def __init__(
        self,
        handoff_id: bytes,
        push: Push,
        sender: Sender,
        ready: Callable[[], Awaitable[None]],
        send_by_link: Callable[[str, Sequence[Outgoing]], Awaitable[None]],
        on_reply: Callable[[kv_transfer_pb2.PushReply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._handoff_id, self._push, self._sender = handoff_id, push, sender
        self._ready, self._send_by_link = ready, send_by_link
        self._on_reply, self._on_lost = on_reply, on_lost
        self._changed = asyncio.Event()
        self._stopping = False
        self._farewell: bytes | None = None
        # What kept the writing half from going on.
        self._problem = ""
        self._cut_off: asyncio.TimerHandle | None = None
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """There may be a batch."""
        self._changed.set()

    def stop(self, farewell: bytes | None) -> None:
        """No more batches; says farewell and ends, or is cut off."""
        self._stopping, self._farewell = True, farewell
        self._changed.set()
        loop = asyncio.get_running_loop()
        self._cut_off = loop.call_later(FAREWELL_TIMEOUT_S, self._push.cancel)

    async def close(self) -> None:
        """Cuts it off now."""
        self._push.cancel()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        writer = asyncio.create_task(self._write())
        detail = "the receiver ended the push before the commit"
        try:
            while (reply := await self._push.receive()) is not None:
                self._on_reply(reply)
        except PushLost as error:
            detail = self._problem or str(error)
        except Exception:
            logger.exception("push failed")
            detail = "internal error"
        finally:
            writer.cancel()
            self._push.cancel()
            if self._cut_off is not None:
                self._cut_off.cancel()
            await asyncio.wait([writer])
            self._on_lost(detail)

    async def _write(self) -> None:
        try:
            await self._ready()
            while not self._stopping:
                batch = self._sender.next_batch(
                    self._handoff_id, frames.FRAME_TARGET_BYTES, time.monotonic()
                )
                if batch is not None and batch.link_id:
                    # One that is lost is the sender's to hear of, from the link.
                    with contextlib.suppress(LinkLost):
                        await self._send_by_link(batch.link_id, batch.frames)
                        self._sender.handle_written(self._handoff_id, time.monotonic())
                elif batch is not None:
                    await self._push.send(batch.frames)
                    self._sender.handle_written(self._handoff_id, time.monotonic())
                else:
                    self._changed.clear()
                    await self._changed.wait()
            if self._farewell is not None:
                await self._push.send([Outgoing(self._farewell, memoryview(b""))])
            await self._push.finish()
        except PushLost:
            # Receiving says why, with the receiver's own words when it has sent any.
            pass
        except TransferRefused as error:
            self._problem = str(error)
            self._push.cancel()
        except Exception:
            logger.exception("push failed")
            self._push.cancel()
