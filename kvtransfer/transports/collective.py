"""Links: frames between two transfer services through a torch.distributed process group of two.

A link goes one way, from rank 0 to rank 1, and lives as long as the stream that joins the two
services. Each pair has its own group; there is no world. Frames are announced over the stream: a
data frame by its header alone, any other frame as a whole. Only payloads of data frames go through
the group, and the receiving end posts the receive of a payload after it has checked the header. So

- an idle link has no operation in the group: an NCCL receive is a kernel that spins on the GPU, and
  a receive of either backend has a timeout;
- a receive always has the size of the send: otherwise gloo ends the process.

Ownership: only the link's own thread uses the group, except for `cut`. The group reads the sender's
payloads until `send` returns, even when the link or the caller has ended. The receiver's payloads
land in buffers of the link, never in staging, so a late write cannot hit another handoff's bytes.
The event loop owns everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import Frame
from baton.kvtransfer.sending import Outgoing
from baton.kvtransfer.transports.link_store import LinkStore
from baton.kvtransfer.transports.process_group import RECEIVER, SENDER, Group, LinkOptions, join
from baton.kvtransfer.transports.transport import LinkLost
from baton.v1 import kv_transfer_pb2

_T = TypeVar("_T")

# Key of the messages that announce frames; each frame is its length and its bytes.
FRAMES_KEY = "frames"
_LENGTH = struct.Struct("<I")
# Buffers of the receiving end: one is consumed while the next is filled.
_NUM_BUFFERS = 2
# Most batches that wait for the sending end's thread, and most sends that it has posted.
_MAX_BATCHES = 16
_MAX_POSTED = 8
# Most frames that are announced and not yet received. The payloads, which are taken two at a time,
# slow down a correct sender; only commits have no payload.
_MAX_ANNOUNCED = 16384
# Longest wait in seconds for a thread to end; only a thread that is connecting needs long.
_CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class _Ended(Exception):
    """Tells the link's thread to end."""


class _Link(ABC):
    """One end of a link. Constructed and called on a running event loop.

    Args:
        options: Settings of this end.
        publish: Writes a message to the peer's end of the stream, in order. Called on the event
            loop; must not block.
        on_lost: Called once on the event loop with the reason when the link has ended; never after
            `close`.
    """

    _rank: int

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[kv_transfer_pb2.LinkMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._options, self._publish, self._on_lost = options, publish, on_lost
        self._loop = asyncio.get_running_loop()
        self._over: str | None = None
        self._opened, self._thread_gone = asyncio.Event(), asyncio.Event()
        self._store = LinkStore(lambda key, value: self._call(self._set, key, value))
        # Guards the attributes below and the data that subclasses share with the thread.
        self._changed = threading.Condition()
        self._ending = False
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Waits until the group is joined. Raises LinkLost."""
        await self._opened.wait()
        if self._over is not None:
            raise LinkLost(self._over)

    def received(self, message: kv_transfer_pb2.LinkMessage) -> None:
        """Handles a message of the peer's end of the stream. A wrong message ends the link."""
        if self._over is None:
            try:
                self._handle(message.key, message.value)
            except (LinkLost, MalformedFrame) as error:
                self.fail(str(error))

    def fail(self, detail: str) -> None:
        """Ends the link because its stream has ended or sent a wrong message. Idempotent."""
        if self._finish(detail):
            self._on_lost(detail)

    async def close(self) -> None:
        """Ends the link and waits at most _CLOSE_TIMEOUT_S for its thread. Idempotent."""
        self._finish("the link was closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._thread_gone.wait()

    @property
    def lost(self) -> str | None:
        """Why the link has ended; None while it has not."""
        return self._over

    @abstractmethod
    def _handle(self, key: str, value: bytes) -> None:
        """Handles one message of the peer."""

    @abstractmethod
    def _serve(self, group: Group) -> None:
        """Runs in the thread. Raises _Ended and the errors of the group."""

    @abstractmethod
    def _release_payloads(self) -> None:
        """Called when thread and group have ended: payloads are not used any more."""

    def _finish(self, detail: str) -> bool:
        if self._over is not None:
            return False
        self._over = detail
        with self._changed:
            self._ending, group = True, self._group
            self._changed.notify_all()
        self._store.close(detail)
        if group is not None:
            group.cut()
        self._opened.set()
        return True

    def _set(self, key: str, value: bytes) -> None:
        if self._over is None:
            self._publish(kv_transfer_pb2.LinkMessage(key=key, value=value))

    def _joined(self) -> None:
        self._opened.set()

    def _ended(self, detail: str) -> None:
        self.fail(detail)
        # The thread has only to return, so this does not block.
        self._thread.join()
        self._release_payloads()
        self._thread_gone.set()

    # ---- In the thread.

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        # The loop may be closed already when the process ends.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        detail = "the link was closed"
        try:
            self._serve(self._join())
        except _Ended:
            pass
        except (LinkLost, MalformedFrame, RuntimeError, OSError) as error:
            detail = f"{self._options.backend}: {_short_message(error)}"
        except Exception:
            logger.exception("link failed")
            detail = "internal error"
        with self._changed:
            group, self._group = self._group, None
        del group
        self._call(self._ended, detail)

    def _take(self, next_one: Callable[[], _T | None], *, block: bool) -> _T | None:
        """Returns the next piece of work, or None; waits for it if `block`. Raises _Ended."""
        with self._changed:
            while not self._ending:
                if (taken := next_one()) is not None or not block:
                    return taken
                self._changed.wait()
            raise _Ended

    def _join(self) -> Group:
        group = join(self._store, self._rank, self._options)
        with self._changed:
            self._group = group
        self._call(self._joined)
        return group


@dataclass(slots=True)
class _Batch:
    """Payloads to send, in order. `done` tells the sender whether all have left."""

    payloads: list[memoryview]
    done: asyncio.Future[bool]


class SendingLink(_Link):
    """The sending end."""

    _rank = SENDER

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[kv_transfer_pb2.LinkMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        # The thread takes them from the queue; those not done are the event loop's to settle.
        self._queue: deque[_Batch] = deque()
        self._not_done: set[asyncio.Future[bool]] = set()
        self._room = asyncio.Semaphore(_MAX_BATCHES)
        super().__init__(options, publish, on_lost)

    async def send(self, batch: Sequence[Outgoing]) -> None:
        """Sends frames in this order, after those of earlier calls.

        The group reads the payloads until this method returns or raises. A cancellation is
        therefore raised only when the payloads are no longer read, at most frame_timeout_s later.

        Raises:
            LinkLost: Not every frame has left.
        """
        await self.opened()
        async with self._room:
            if self._over is not None:
                raise LinkLost(self._over)
            self._publish(
                kv_transfer_pb2.LinkMessage(key=FRAMES_KEY, value=b"".join(_announcement(batch)))
            )
            payloads = [outgoing.payload for outgoing in batch if outgoing.payload]
            if not payloads:
                return
            done = self._loop.create_future()
            self._not_done.add(done)
            with self._changed:
                self._queue.append(_Batch(payloads, done))
                self._changed.notify_all()
            if not await _wait_uncancelled(done):
                raise LinkLost(self._over or "the link was lost")

    def _handle(self, key: str, value: bytes) -> None:
        self._store.received(key, value)

    def _done(self, done: asyncio.Future[bool]) -> None:
        if done in self._not_done:
            self._not_done.remove(done)
            done.set_result(True)

    def _release_payloads(self) -> None:
        self._queue.clear()
        for done in self._not_done:
            done.set_result(False)
        self._not_done.clear()

    def _serve(self, group: Group) -> None:
        # Sends that the group has begun; the last one of a batch has the batch's future.
        posted: deque[tuple[Any, asyncio.Future[bool] | None]] = deque()
        waiting: deque[tuple[memoryview, asyncio.Future[bool] | None]] = deque()
        while True:
            if (batch := self._take(self._next, block=not posted and not waiting)) is not None:
                *others, last = batch.payloads
                waiting.extend((payload, None) for payload in others)
                waiting.append((last, batch.done))
                # A reference to staging that is freed soon would keep the segment mapped.
                del batch, others, last
            while waiting and len(posted) < _MAX_POSTED:
                payload, done = waiting.popleft()
                posted.append((group.send(payload), done))
                del payload
            work, done = posted.popleft()
            group.wait(work, self._options.frame_timeout_s)
            del work
            if done is not None:
                self._call(self._done, done)

    def _next(self) -> _Batch | None:
        return self._queue.popleft() if self._queue else None


@dataclass(slots=True)
class _Incoming:
    """A frame in one of the link's buffers; `work` is the receive of its payload, if any."""

    buffer: memoryview
    frame: Frame
    work: Any = None


@dataclass(slots=True)
class _Announced:
    """Guarded by the link's condition: frames to be received, and buffers for them."""

    queue: deque[bytes] = field(default_factory=deque)
    free: list[memoryview] = field(default_factory=list)


class ReceivingLink(_Link):
    """The receiving end.

    Args:
        on_frame: Called on the event loop with each frame, in the order of sending. The link reuses
            the payload's memory when it returns.
    """

    _rank = RECEIVER

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[kv_transfer_pb2.LinkMessage], None],
        on_lost: Callable[[str], None],
        on_frame: Callable[[Frame], None],
    ) -> None:
        self._on_frame, self._announced = on_frame, _Announced()
        super().__init__(options, publish, on_lost)

    def _handle(self, key: str, value: bytes) -> None:
        if key != FRAMES_KEY:
            self._store.received(key, value)
            return
        announced = list(_announced_frames(value))
        with self._changed:
            if len(self._announced.queue) + len(announced) > _MAX_ANNOUNCED:
                raise LinkLost(f"more than {_MAX_ANNOUNCED} frames announced")
            self._announced.queue.extend(announced)
            self._changed.notify_all()

    def _release_payloads(self) -> None:
        self._announced = _Announced()

    def _deliver(self, incoming: _Incoming) -> None:
        if self._over is not None:
            return
        try:
            self._on_frame(incoming.frame)
        except Exception:
            logger.exception("frame of a link failed")
            self.fail("internal error")
        with self._changed:
            self._announced.free.append(incoming.buffer)
            self._changed.notify_all()

    def _serve(self, group: Group) -> None:
        num_bytes = frames.HEADER_BYTES + self._options.max_payload_bytes
        self._announced.free += [group.buffer(num_bytes) for _ in range(_NUM_BUFFERS)]
        posted: deque[_Incoming] = deque()
        while True:
            while (taken := self._take(self._next, block=not posted)) is not None:
                posted.append(self._begin(group, *taken))
                del taken
            incoming = posted.popleft()
            if incoming.work is not None:
                group.wait(incoming.work, self._options.frame_timeout_s)
                incoming.work = None
            self._call(self._deliver, incoming)
            del incoming

    def _next(self) -> tuple[bytes, memoryview] | None:
        if self._announced.queue and self._announced.free:
            return self._announced.queue.popleft(), self._announced.free.pop()
        return None

    def _begin(self, group: Group, announced: bytes, buffer: memoryview) -> _Incoming:
        """Puts a frame into a buffer and begins to receive its payload; checks the header."""
        if len(announced) > len(buffer):
            raise MalformedFrame(f"frame of {len(announced)} bytes; at most {len(buffer)}")
        buffer[: len(announced)] = announced
        # Bytes behind the announcement are those of earlier frames until the payload is received.
        frame = next(frames.decode(buffer))
        if len(announced) == frames.HEADER_BYTES + len(frame.payload):
            return _Incoming(buffer, frame)
        if len(announced) != frames.HEADER_BYTES:
            raise MalformedFrame(
                f"frame of {len(announced)} bytes with a payload of {len(frame.payload)}"
            )
        return _Incoming(buffer, frame, group.recv(frame.payload))


def _announcement(batch: Sequence[Outgoing]) -> Iterator[bytes]:
    for outgoing in batch:
        yield _LENGTH.pack(len(outgoing.header))
        yield outgoing.header


def _announced_frames(value: bytes) -> Iterator[bytes]:
    """Yields the frames of an announcement. Raises MalformedFrame."""
    view = memoryview(value)
    while view:
        length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 0
        end = _LENGTH.size + length
        if not frames.HEADER_BYTES <= length <= len(view) - _LENGTH.size:
            raise MalformedFrame(f"announcement of {len(value)} bytes is not one of whole frames")
        yield bytes(view[_LENGTH.size : end])
        view = view[end:]


async def _wait_uncancelled(done: asyncio.Future[bool]) -> bool:
    """Waits for a future even when cancelled, and raises the cancellation afterwards."""
    cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return done.result()


def _short_message(error: Exception) -> str:
    """Returns an error's message without torch's source lines and advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", text).split(". This is typically")[0]
