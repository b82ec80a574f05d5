"""Notifies the transfer service of the blocks that a rank has filled, once the bytes are there.

On a CPU a copy ends with its call, and the rank notifies the service itself. On a GPU a thread
waits for the copy, so that the rank can continue to launch its model. Both keep the order of the
calls: a rank's last frame is the last one that the service gets.
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

from baton.kvtransfer.engine_port import EnginePort, filled_frame
from baton.v1 import kv_transfer_pb2

# Bytes per notification: each one wakes the service on another core. The last one of a step may be
# smaller.
NOTIFY_BYTES = 2**19
# Bytes for which the thread wakes up. It takes the interpreter lock from the thread that launches
# the model, at each of that thread's next calls.
_WAKE_BYTES = 8 * 2**20
# Most calls that wait for the GPU: more than the largest step makes (requests times layers).
_MAX_QUEUED = 2**16
_PUT_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class Copy(Protocol):
    """A copy that may still be under way."""

    def wait(self) -> None:
        """Returns when the bytes are there. Any thread may call it; for a gather, once.

        Raises:
            RuntimeError: The copy has failed.
        """


@dataclass(frozen=True, slots=True)
class StagedFrame:
    """A frame's blocks in staging.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        layer: Index of the layer.
        first_block: Index of the first block within the handoff.
        num_blocks: Number of blocks.
        offset: Where the bytes begin in the segment.
        num_bytes: Number of bytes.
        last: Whether this is the rank's last frame of the handoff.
    """

    handoff_id: bytes
    layer: int
    first_block: int
    num_blocks: int
    offset: int
    num_bytes: int
    last: bool


class Notifier:
    """Notifies the service from the caller's thread, and waits for copies there.

    One thread uses the notifier and its port.

    Args:
        port: The thread's connection to the transfer service.
        shard: Shard that this rank sends.
        stage: Pipeline stage of this rank.
    """

    def __init__(self, port: EnginePort, shard: int, stage: int = 0) -> None:
        self._port, self._shard, self._stage = port, shard, stage
        self._frames: list[kv_transfer_pb2.LocalFrame] = []
        self._num_bytes = 0

    @property
    def alive(self) -> bool:
        """False once the service no longer gets notifications."""
        return self._port.alive

    def filled(self, copy: Copy, filled: Sequence[StagedFrame]) -> None:
        """Waits for the copy and queues its frames; call `flush` after a step's last frames."""
        try:
            copy.wait()
        except RuntimeError as error:
            logger.error("copy to staging failed: %s", error)
            for handoff_id in {each.handoff_id for each in filled}:
                self.end_writing(handoff_id)
            return
        if not self._port.alive:
            return
        for each in filled:
            data = self._port.memory[each.offset : each.offset + each.num_bytes]
            self._frames.append(
                filled_frame(
                    each.handoff_id,
                    self._shard,
                    each.layer,
                    each.first_block,
                    each.num_blocks,
                    data,
                    last=each.last,
                    stage=self._stage,
                )
            )
            self._num_bytes += each.num_bytes
            if self._num_bytes >= NOTIFY_BYTES:
                self.flush()

    def flush(self) -> None:
        """Sends the queued frames."""
        if self._frames:
            self._port.send_frames(self._frames)
        self._frames, self._num_bytes = [], 0

    def abort(self, handoff_id: bytes) -> None:
        """Aborts an incomplete handoff that every rank stops writing.

        The service frees the staging soon, so only HandoffScheduler may order this: it stops
        all ranks. All earlier frames of this rank have been sent. The abort is sent before the
        rank's last frame, which the service would otherwise take for a commit.
        """
        self.flush()
        self._port.abort_send(handoff_id)
        self.end_writing(handoff_id)

    def end_writing(self, handoff_id: bytes) -> None:
        """Tells that this rank writes no more of an incomplete handoff; other ranks may write on.

        The receiver refuses the commit, because blocks are missing. The service keeps the staging
        until every rank has sent its last frame.
        """
        self.flush()
        last = kv_transfer_pb2.LocalFrame(
            handoff_id=handoff_id, shard=self._shard, stage=self._stage, last=True
        )
        self._port.send_frames([last])

    def close(self) -> None:
        """Does nothing: no copy is waited for."""


class NotifierThread:
    """Runs a notifier in a thread, in the order of the calls.

    The thread owns the notifier and its port until `close`. A caller waits only while the queue is
    full, for at most put_timeout_s. After that the thread counts as dead: it takes no more calls,
    and the handoffs under way expire at the service.

    Args:
        notifier: The notifier.
        port: The notifier's port.
        prepare: Called in the thread before anything else (BlockCopies.bind_thread).
        max_queued: Most calls that wait.
        put_timeout_s: Longest wait of a caller while the queue is full, in seconds.
    """

    def __init__(
        self,
        notifier: Notifier,
        port: EnginePort,
        *,
        prepare: Callable[[], None],
        max_queued: int = _MAX_QUEUED,
        put_timeout_s: float = _PUT_TIMEOUT_S,
    ) -> None:
        self._notifier, self._port, self._put_timeout_s = notifier, port, put_timeout_s
        self._prepare = prepare
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(max_queued)
        self._taking, self._has_failed = True, False
        # Copies that the thread does not know of yet, and their bytes.
        self._copies: list[tuple[Copy, Sequence[StagedFrame]]] = []
        self._num_bytes = 0
        self._thread = threading.Thread(target=self._run, name="baton-notifier", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._taking and self._notifier.alive

    def filled(self, copy: Copy, filled: Sequence[StagedFrame]) -> None:
        self._copies.append((copy, filled))
        self._num_bytes += sum(each.num_bytes for each in filled)
        if self._num_bytes >= _WAKE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._copies:
            self._put(partial(self._all_filled, self._copies))
        self._copies, self._num_bytes = [], 0

    def _all_filled(self, copies: Sequence[tuple[Copy, Sequence[StagedFrame]]]) -> None:
        for copy, filled in copies:
            self._notifier.filled(copy, filled)
        self._notifier.flush()

    def abort(self, handoff_id: bytes) -> None:
        self.flush()
        self._put(partial(self._notifier.abort, handoff_id))

    def end_writing(self, handoff_id: bytes) -> None:
        self.flush()
        self._put(partial(self._notifier.end_writing, handoff_id))

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Waits for queued notifications to be sent, then closes the port. Idempotent.

        If that takes too long, or if the thread has failed, the port stays open: memory under a
        copy that may still run must stay mapped.
        """
        deadline = time.monotonic() + timeout_s
        self.flush()
        self._taking = False
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout_s)
            except queue.Full:
                logger.error("copies to staging have not ended in %.1f s", timeout_s)
                return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._has_failed:
            logger.error("nothing waits for the copies to staging since the thread has failed")
            return
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
        try:
            self._prepare()
        except RuntimeError as error:
            logger.error("the notifier thread cannot start: %s", error)
            self._taking = False
            return
        try:
            while (call := self._queue.get()) is not None:
                call()
        except Exception:
            # Without its thread, the rank would go on to queue handoffs that nothing sends.
            logger.exception("the notifier thread has failed: this rank hands over nothing more")
            self._taking, self._has_failed = False, True
