"""Shared memory between two services of one host: the receiver copies from the sender's segment.

What the sender's stream carries are references. The receiver maps the segment read-only, so it can
harm nothing of the sender's, and a sender that is killed takes no bytes away from under a copy: a
mapping outlives the file. What changes under a copy (an aborted send, a prompt computed again) is
found by the checksum of what was copied.
"""

from __future__ import annotations

import asyncio
import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

from baton.kvtransfer.arena import SEGMENT_DIRECTORY, Segment
from baton.kvtransfer.errors import MalformedFrame, TransferError
from baton.kvtransfer.frames import Frame

# A segment that no push refers to is unmapped after so long: its owner may be gone, and its memory
# stays with whoever maps it.
IDLE_TIMEOUT_S = 5.0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def domain() -> str:
    """Names the shared memory this process sees: two that give the same name see the same."""
    try:
        boot_id = _BOOT_ID.read_text(encoding="utf-8").strip()
        mount = os.stat(SEGMENT_DIRECTORY).st_dev
    except OSError as error:
        raise TransferError(f"no shared memory: {error}") from None
    return f"{boot_id}/{mount}/{os.getuid()}"


@dataclass(slots=True)
class _Mapped:
    segment: Segment
    streams: set[int] = field(default_factory=set)
    idle_timer: asyncio.TimerHandle | None = None


class PeerSegments:
    """Other services' segments, mapped as long as streams refer to them and a little longer."""

    def __init__(self) -> None:
        self._mapped: dict[str, _Mapped] = {}
        self._names: dict[int, str] = {}

    def attach(self, stream: int, name: str) -> None:
        """Lets a stream refer to a segment. Raises TransferError when it cannot be mapped."""
        mapped = self._mapped.get(name)
        if mapped is None:
            mapped = self._mapped[name] = _Mapped(Segment.open(name, read_only=True))
        if mapped.idle_timer is not None:
            mapped.idle_timer.cancel()
            mapped.idle_timer = None
        mapped.streams.add(stream)
        self._names[stream] = name

    def detach(self, stream: int) -> None:
        """The stream refers to no segment any more. Idempotent."""
        name = self._names.pop(stream, None)
        if name is None:
            return
        mapped = self._mapped[name]
        mapped.streams.discard(stream)
        if not mapped.streams:
            loop = asyncio.get_running_loop()
            mapped.idle_timer = loop.call_later(IDLE_TIMEOUT_S, self._unmap, name)

    def resolve(self, stream: int, frame: Frame, num_bytes: int) -> Frame:
        """The data frame that a stream's reference stands for.

        Raises:
            MalformedFrame: the stream refers to no segment, or not into it.
        """
        name = self._names.get(stream)
        if name is None:
            raise MalformedFrame("a reference on a stream that has not chosen shared memory")
        return frame.referenced(self._mapped[name].segment.memory, num_bytes)

    def close(self) -> None:
        """Unmaps everything."""
        self._names.clear()
        for name in list(self._mapped):
            self._unmap(name)

    def _unmap(self, name: str) -> None:
        mapped = self._mapped.pop(name)
        if mapped.idle_timer is not None:
            mapped.idle_timer.cancel()
        if not mapped.segment.close():
            # A frame of a stream that broke, in a cycle with the error that ended it: in a service
            # that has nothing else to do nobody would come to collect it.
            gc.collect()
