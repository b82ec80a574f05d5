"""Links: frames between two transfer services through a torch.distributed process group of two.

A link goes one way, from rank 0 to rank 1, and is as long-lived as the stream that joins the two
services; pairs come and go, and there is no world. Frames are announced over that stream: a data
frame by its header alone, any other frame whole. Only payloads of data frames go through the group,
and the receiving end asks the group for a payload once it has checked the header. So

- a link that waits for work holds nothing of the group: with NCCL a receive is a kernel that spins
  on the GPU, with either a receive is something with a timeout;
- the group is never asked for another size than what was sent: gloo ends the process then.

Who owns what: a link's one thread owns the group and is the only one to use it, but for `cut`. The
sender's payloads are read by the group from `send` until that returns, whatever becomes of the link
or of the caller. The receiver's payloads land in buffers of the link, never in staging: a late
write meets nobody else's bytes. Everything else belongs to the event loop.
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

# The key of messages that announce frames: each as its length and its bytes.
FRAMES_KEY = "frames"
_LENGTH = struct.Struct("<I")
# Of the receiving end: one is consumed while the next is filled.
_NUM_BUFFERS = 2
# Batches whose payloads wait for the sending end's thread, and sends that it has posted.
_MAX_BATCHES = 16
_MAX_POSTED = 8
# Frames announced and not yet received. An honest sender is held back by its payloads, which are
# taken two at a time; only commits come without one.
_MAX_ANNOUNCED = 16384
# A thread that has been told to end needs far less, unless it is connecting.
_CLOSE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class _Ended(Exception):
    """The link's thread is told to end."""


class _Link(ABC):
    """One end of a link. Constructed and called on a running event loop.

    Args:
        publish: writes a message to the peer's end of the stream; called on the event loop, must
            not block, and keeps the order.
        on_lost: the link is over, and why; called on the event loop, once, and never after `close`.
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
        # Guards what follows, and what subclasses share with the thread.
        self._changed = threading.Condition()
        self._ending = False
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._run, name="kv-link", daemon=True)
        self._thread.start()

    async def opened(self) -> None:
        """Waits until the group is joined; raises LinkLost."""
        await self._opened.wait()
        if self._over is not None:
            raise LinkLost(self._over)

    def received(self, message: kv_transfer_pb2.LinkMessage) -> None:
        """A message of the peer's end of the stream. What must not be there ends the link."""
        if self._over is None:
            try:
                self._handle(message.key, message.value)
            except (LinkLost, MalformedFrame) as error:
                self.fail(str(error))

    def fail(self, detail: str) -> None:
        """Ends the link: its stream has ended, or cannot be trusted. Idempotent."""
        if self._finish(detail):
            self._on_lost(detail)

    async def close(self) -> None:
        """Ends the link and waits, for a bounded time, until nothing of it is left. Idempotent."""
        self._finish("the link was closed")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._thread_gone.wait()

    @property
    def lost(self) -> str | None:
        """Why the link is over; None while it is not."""
        return self._over

    @abstractmethod
    def _handle(self, key: str, value: bytes) -> None:
        """One message."""

    @abstractmethod
    def _serve(self, group: Group) -> None:
        """What the thread does; raises _Ended, or whatever the group raises."""

    @abstractmethod
    def _settle(self) -> None:
        """The thread and the group are gone: nobody reads or writes payloads any more."""

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
        # It has nothing left to do but to return.
        self._thread.join()
        self._settle()
        self._thread_gone.set()

    # ---- In the thread.

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        # The loop is closed when its process is about to end.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        detail = "the link was closed"
        try:
            self._serve(self._join())
        except _Ended:
            pass
        except (LinkLost, MalformedFrame, RuntimeError, OSError) as error:
            detail = f"{self._options.backend}: {_in_short(error)}"
        except Exception:
            logger.exception("link failed")
            detail = "internal error"
        with self._changed:
            group, self._group = self._group, None
        del group
        self._call(self._ended, detail)

    def _take(self, next_one: Callable[[], _T | None], *, block: bool) -> _T | None:
        """The next piece of work; None when there is none and not to `block`. Raises _Ended."""
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
    """Payloads on their way, in order; who sent them waits for `done`: whether all have left."""

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

        Payloads are read until this returns or raises, also when the caller is cancelled: that is
        heard of only then, after at most the frame's time.

        Raises:
            LinkLost: not every frame has left.
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
            if not await _surely(done):
                raise LinkLost(self._over or "the link was lost")

    def _handle(self, key: str, value: bytes) -> None:
        self._store.received(key, value)

    def _done(self, done: asyncio.Future[bool]) -> None:
        if done in self._not_done:
            self._not_done.remove(done)
            done.set_result(True)

    def _settle(self) -> None:
        self._queue.clear()
        for done in self._not_done:
            done.set_result(False)
        self._not_done.clear()

    def _serve(self, group: Group) -> None:
        # What the group reads; the last of a batch with the batch's future.
        posted: deque[tuple[Any, asyncio.Future[bool] | None]] = deque()
        waiting: deque[tuple[memoryview, asyncio.Future[bool] | None]] = deque()
        while True:
            if (batch := self._take(self._next, block=not posted and not waiting)) is not None:
                *others, last = batch.payloads
                waiting.extend((payload, None) for payload in others)
                waiting.append((last, batch.done))
                # References to memory that is about to be somebody else's would keep it mapped.
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
    """A frame in one of the link's buffers; its payload is being received unless work is None."""

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
        on_frame: a frame, in the order in which they were sent; called on the event loop. The
            payload is the link's again when it returns.
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
        announced = list(_announced(value))
        with self._changed:
            if len(self._announced.queue) + len(announced) > _MAX_ANNOUNCED:
                raise LinkLost(f"more than {_MAX_ANNOUNCED} frames announced")
            self._announced.queue.extend(announced)
            self._changed.notify_all()

    def _settle(self) -> None:
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
        """Lays a frame out in a buffer: header, then payload; both checked but for the latter."""
        if len(announced) > len(buffer):
            raise MalformedFrame(f"frame of {len(announced)} bytes; at most {len(buffer)}")
        buffer[: len(announced)] = announced
        # What is beyond the announcement is from earlier frames, until it is received.
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


def _announced(value: bytes) -> Iterator[bytes]:
    """The frames of an announcement; raises MalformedFrame."""
    view = memoryview(value)
    while view:
        length = _LENGTH.unpack_from(view)[0] if len(view) >= _LENGTH.size else 0
        end = _LENGTH.size + length
        if not frames.HEADER_BYTES <= length <= len(view) - _LENGTH.size:
            raise MalformedFrame(f"announcement of {len(value)} bytes is not one of whole frames")
        yield bytes(view[_LENGTH.size : end])
        view = view[end:]


async def _surely(done: asyncio.Future[bool]) -> bool:
    """Waits for it, also when cancelled meanwhile; the cancellation counts then."""
    cancelled = False
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return done.result()


def _in_short(error: Exception) -> str:
    """What happened, without torch's source lines and advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", text).split(". This is typically")[0]
