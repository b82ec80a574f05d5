"""Tells the transfer service what a rank has filled, once the bytes are there.

Where a copy ends with the call that makes it (on the CPU) the rank tells it itself. Where it only
begins there (on a GPU) a thread waits for it, so that the rank goes on launching its model. Both
speak in the order in which they were told: a rank's last frame is the last that the service hears.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.kvtransfer.engine_port import FIRST_EPOCH, EnginePort, filled_frame
from baton.v1 import kv_transfer_pb2

# Each notification wakes the service on another core; fewer bytes are not worth it, unless nothing
# follows them.
NOTIFY_BYTES = 2**19
# What a GPU has yet to copy: more than the largest step makes (its requests times its layers).
_MAX_QUEUED = 2**16
_PUT_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Copy(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """Returns when the bytes are there. Called once, by any thread.

        Raises:
            RuntimeError: they will never be.
        """


@dataclass(frozen=True, slots=True)
class Filled:
    """A frame's blocks in staging.

    Attributes:
        offset: of its bytes in the segment.
        num_bytes: of them.
        last: whether nothing more follows from this rank.
    """

    handoff_id: bytes
    layer: int
    first_block: int
    num_blocks: int
    offset: int
    num_bytes: int
    last: bool


class Notifier:
    """Waits where it is called. One thread uses it, and its port with it.

    Args:
        shard: whose staging is filled.
    """

    def __init__(self, port: EnginePort, shard: int) -> None:
        self._port, self._shard = port, shard
        self._frames: list[kv_transfer_pb2.LocalFrame] = []
        self._num_bytes = 0

    @property
    def alive(self) -> bool:
        """False: nobody hears of what is filled from now on."""
        return self._port.alive

    def filled(self, copy: Copy, filled: Sequence[Filled]) -> None:
        """These frames are in staging when the copy has ended. `flush` after the last of a step."""
        try:
            copy.wait()
        except RuntimeError as error:
            logger.error("copy to staging failed: %s", error)
            for handoff_id in {each.handoff_id for each in filled}:
                self.ended(handoff_id)
            return
        if not self._port.alive:
            return
        for each in filled:
            data = self._port.memory[each.offset : each.offset + each.num_bytes]
            self._frames.append(
                filled_frame(
                    each.handoff_id,
                    FIRST_EPOCH,
                    self._shard,
                    each.layer,
                    each.first_block,
                    each.num_blocks,
                    data,
                    last=each.last,
                )
            )
            self._num_bytes += each.num_bytes
            if self._num_bytes >= NOTIFY_BYTES:
                self.flush()

    def flush(self) -> None:
        """Tells what was not told yet."""
        if self._frames:
            self._port.send_frames(self._frames)
        self._frames, self._num_bytes = [], 0

    def ended(self, handoff_id: bytes) -> None:
        """This rank writes nothing more of a handoff that it did not complete.

        Everything it wrote before has arrived, so the service may give the staging to another
        handoff. The abort goes first: an incomplete send that is not over would take the rank's
        last frame for a commit.
        """
        self.flush()
        self._port.abort_send(handoff_id)
        last = kv_transfer_pb2.LocalFrame(
            handoff_id=handoff_id, epoch=FIRST_EPOCH, rank=self._shard, last=True
        )
        self._port.send_frames([last])

    def close(self) -> None:
        """Nothing is left to wait for."""


class NotifierThread:
    """The same, without waiting: one thread does, in the order of the calls.

    It owns the notifier and its port from here to `close`. Callers wait only while the queue is
    full, and never longer than put_timeout_s: after that it counts as dead, nothing is taken any
    more, and the handoffs under way expire at the service.
    """

    def __init__(
        self,
        notifier: Notifier,
        port: EnginePort,
        *,
        max_queued: int = _MAX_QUEUED,
        put_timeout_s: float = _PUT_TIMEOUT_S,
    ) -> None:
        self._notifier, self._port, self._put_timeout_s = notifier, port, put_timeout_s
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(max_queued)
        self._taking = True
        self._thread = threading.Thread(target=self._run, name="baton-notifier", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._taking and self._notifier.alive

    def filled(self, copy: Copy, filled: Sequence[Filled]) -> None:
        self._put(partial(self._notifier.filled, copy, filled))

    def flush(self) -> None:
        self._put(self._notifier.flush)

    def ended(self, handoff_id: bytes) -> None:
        self._put(partial(self._notifier.ended, handoff_id))

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Waits for what was put, tells it, and closes the port; idempotent.

        What does not arrive in time keeps its thread and its port: the memory under a copy that may
        still run must stay mapped.
        """
        deadline = time.monotonic() + timeout_s
        self._taking = False
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                logger.error("copies to staging have not ended in %.1f s", timeout_s)
                return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            logger.error("copies to staging have not ended in %.1f s", timeout_s)
            return
        self._port.close()

    def _put(self, call: Callable[[], None]) -> None:
        if not self._taking:
            return
        try:
            self._queue.put(call, timeout=self._put_timeout_s)
        except queue.Full:
            logger.error(
                "%d copies to staging wait, and none has ended in %.1f s: this rank hands over "
                "nothing more",
                self._queue.maxsize,
                self._put_timeout_s,
            )
            self._taking = False

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
