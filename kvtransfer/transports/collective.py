"""Links: a receiver reads from a sender's staging, by a torch.distributed process group of two.

A link goes one way, from rank 0 to rank 1, and lives as long as the stream that joins the two
services. Each pair has its own group; there is no world. NCCL has no one-sided reads, so a read
takes both ends: the receiving end posts a receive and then asks over the stream for the bytes
(LinkRead), and the sending end sends the bytes that it was asked for. So

- the owner of the target begins every transfer, and sees its end;
- an idle link has no operation in the group: an NCCL receive is a kernel that spins on the GPU, and
  a receive of either backend has a timeout;
- a receive always has the size of the send: otherwise gloo ends the process.

Ownership: only the link's own thread uses the group. Bytes arrive in buffers of the link, and that
thread copies them to staging. So nothing writes to the target of a read that the thread has
reported, or after the thread has ended, even if the group still receives something. The event loop
owns everything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import xxhash

from baton.kvtransfer import frames
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.link_store import LinkStore
from baton.kvtransfer.transports.process_group import RECEIVER, SENDER, Group, LinkOptions, join
from baton.kvtransfer.transports.transport import EndedPull, Pull
from baton.v1 import kv_transfer_pb2 as pb

_T = TypeVar("_T")

# Most bytes of one operation of the group: a frame of usual size.
PART_BYTES = frames.FRAME_TARGET_BYTES
# Buffers of the receiving end. So many receives are posted before the first one has ended.
_NUM_BUFFERS = 4
# Most reads that a receiving end may have asked for, and that the sending end has not begun.
_MAX_ASKED = 64
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
        memory: This service's segment.
    """

    _rank: int

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[pb.LinkMessage], None],
        on_lost: Callable[[str], None],
        memory: memoryview,
    ) -> None:
        self._options, self._publish, self._on_lost = options, publish, on_lost
        self._memory = memory
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
        """Waits until the group is joined. Raises TransferError."""
        await self._opened.wait()
        if self._over is not None:
            raise TransferError(self._over)

    def received(self, message: pb.LinkMessage) -> None:
        """Handles a message of the peer's end of the stream. A wrong message ends the link."""
        if self._over is None:
            try:
                self._handle(message)
            except TransferError as error:
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
    def thread_ended(self) -> bool:
        """Whether the thread has ended. A thread that a library never returns to goes on."""
        return self._thread_gone.is_set()

    @property
    def lost(self) -> str | None:
        """Why the link has ended; None while it has not."""
        return self._over

    def _handle(self, message: pb.LinkMessage) -> None:
        """Handles one message of the peer. Raises TransferError if it is wrong."""
        self._store.received(message.key, message.value)

    @abstractmethod
    def _serve(self, group: Group) -> None:
        """Runs in the thread. Raises _Ended and the errors of the group."""

    def _thread_ended(self) -> None:
        """Called on the event loop when the thread has ended."""
        return

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
            self._publish(pb.LinkMessage(key=key, value=value))

    def _joined(self) -> None:
        self._opened.set()

    def _ended(self, detail: str) -> None:
        self.fail(detail)
        # The thread has only to return, so this does not block.
        self._thread.join()
        self._thread_gone.set()
        self._thread_ended()

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
        except (TransferError, RuntimeError, OSError) as error:
            detail = f"{self._options.backend}: {_short_message(error)}"
        except Exception:
            logger.exception("link failed")
            detail = "internal error"
        with self._changed:
            group, self._group = self._group, None
        del group
        self._call(self._ended, detail)

    def _take(self, queue: deque[_T], *, block: bool) -> _T | None:
        """Returns the next piece of work, or None; waits for it if `block`. Raises _Ended."""
        with self._changed:
            while not self._ending:
                if queue:
                    return queue.popleft()
                if not block:
                    return None
                self._changed.wait()
            raise _Ended

    def _join(self) -> Group:
        group = join(self._store, self._rank, self._options)
        with self._changed:
            self._group = group
        self._call(self._joined)
        return group


class SendingLink(_Link):
    """The sending end: sends what the other end asks for.

    It reads the segment whether or not the bytes still belong to the handoff that announced them.
    The receiver finds bytes that have changed by their checksum.
    """

    _rank = SENDER

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[pb.LinkMessage], None],
        on_lost: Callable[[str], None],
        memory: memoryview,
    ) -> None:
        self._asked: deque[pb.LinkRead] = deque()
        super().__init__(options, publish, on_lost, memory)

    def _handle(self, message: pb.LinkMessage) -> None:
        if not message.HasField("read"):
            super()._handle(message)
            return
        read = message.read
        if not 0 < read.num_bytes <= PART_BYTES:
            raise TransferError(f"{read.num_bytes} bytes asked for; must be 1 to {PART_BYTES}")
        if read.offset + read.num_bytes > len(self._memory):
            raise TransferError(f"bytes from {read.offset} on asked for; the segment is smaller")
        with self._changed:
            if len(self._asked) >= _MAX_ASKED:
                raise TransferError(f"more than {_MAX_ASKED} reads asked for")
            self._asked.append(read)
            self._changed.notify_all()

    def _serve(self, group: Group) -> None:
        posted: deque[Any] = deque()
        while True:
            while (read := self._take(self._asked, block=not posted)) is not None:
                end = read.offset + read.num_bytes
                posted.append(group.send(self._memory[read.offset : end]))
            group.wait(posted.popleft(), self._options.frame_timeout_s)


@dataclass(slots=True)
class _Read:
    """A read under way, and the checksum of the bytes that have been copied to staging."""

    pull: Pull
    digest: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a read that one operation of the group carries; `begin` counts from its start."""

    read: _Read
    begin: int
    num_bytes: int

    @property
    def is_last(self) -> bool:
        return self.begin + self.num_bytes == self.read.pull.num_bytes


class ReceivingLink(_Link):
    """The receiving end: reads from the segment of the sending end.

    Args:
        options: Settings of this end.
        publish: As for both ends.
        on_lost: As for both ends.
        memory: This service's segment, which the reads write to.
        source_bytes: Size of the sender's segment.
        on_ended: Called on the event loop with reads that have ended, each once; not from `read`.
    """

    _rank = RECEIVER

    def __init__(
        self,
        options: LinkOptions,
        publish: Callable[[pb.LinkMessage], None],
        on_lost: Callable[[str], None],
        memory: memoryview,
        source_bytes: int,
        on_ended: Callable[[Sequence[EndedPull]], None],
    ) -> None:
        self.source_bytes, self._on_ended = source_bytes, on_ended
        self._parts: deque[_Part] = deque()
        # Serial numbers of the reads that have not ended.
        self._reading: set[int] = set()
        super().__init__(options, publish, on_lost, memory)

    def read(self, pull: Pull) -> None:
        """Begins a read after the earlier ones. It fails if the link ends before the read does."""
        self._reading.add(pull.serial)
        if self._thread_gone.is_set():
            self._loop.call_soon(self._thread_ended)
            return
        with self._changed:
            self._parts.extend(_parts(pull))
            self._changed.notify_all()

    def _thread_ended(self) -> None:
        failed, self._reading = self._reading, set()
        if failed:
            self._on_ended([EndedPull(serial, None) for serial in failed])

    def _ask(self, part: _Part) -> None:
        if self._over is None:
            offset = part.read.pull.source + part.begin
            self._publish(pb.LinkMessage(read=pb.LinkRead(offset=offset, num_bytes=part.num_bytes)))

    def _landed(self, serial: int, digest: int) -> None:
        self._reading.remove(serial)
        self._on_ended([EndedPull(serial, digest)])

    # ---- In the thread.

    def _serve(self, group: Group) -> None:
        free = [group.buffer(PART_BYTES) for _ in range(_NUM_BUFFERS)]
        posted: deque[tuple[_Part, memoryview, Any]] = deque()
        while True:
            while free and (part := self._take(self._parts, block=not posted)) is not None:
                buffer = free.pop()
                posted.append((part, buffer, group.recv(buffer[: part.num_bytes])))
                self._call(self._ask, part)
            part, buffer, work = posted.popleft()
            group.wait(work, self._options.frame_timeout_s)
            del work
            target = part.read.pull.target + part.begin
            landed = self._memory[target : target + part.num_bytes]
            frames.copy(landed, buffer[: part.num_bytes], part.read.digest)
            free.append(buffer)
            if part.is_last:
                self._call(self._landed, part.read.pull.serial, part.read.digest.intdigest())


def _parts(pull: Pull) -> Iterator[_Part]:
    read = _Read(pull)
    for begin in range(0, pull.num_bytes, PART_BYTES):
        yield _Part(read, begin, min(PART_BYTES, pull.num_bytes - begin))


def _short_message(error: Exception) -> str:
    """Returns an error's message without torch's source lines and advice."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return re.sub(r"^\[[^\]]*\] ", "", text).split(". This is typically")[0]
