"""What a client session is still to be told: bounded, however slowly it reads."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from baton.coordinator.session_events import Entry, coalesced
from baton.runtime.errors import BatonError, to_message
from baton.v1 import common_pb2, inference_pb2

# Of one stream's tokens that wait for the reader, and of everything that waits.
MAX_STREAM_BYTES = 1 * 2**20
MAX_SESSION_BYTES = 64 * 2**20
# What an entry takes beside its bytes, about.
_ENTRY_BYTES = 128
# When so much waits, the reader lags: a stream's tokens become one entry, and are counted.
_SEGMENT_BYTES = 512 * 2**10
# One message, about; a client's own limit is several times that.
_MAX_BATCH_BYTES = 2 * 2**20


@dataclass(slots=True)
class _Segment:
    """Entries in order, and what they take; once sealed, also what each stream's tokens take."""

    entries: list[Entry] = field(default_factory=list)
    num_bytes: int = 0
    stream_bytes: Counter[int] = field(default_factory=Counter)


class Outbox:
    """Events in order; while many wait, a stream's token deltas grow into one.

    Everything that one worker message gave the session is here before its writer runs, so it
    leaves as one batch. Tokens are kept as bytes: a part of a worker's message would keep all of it
    in memory for as long as the client takes to read it.

    Args:
        max_stream_bytes: of one stream's waiting tokens.
        max_bytes: of everything waiting.

    Attributes:
        slow_streams: held more than they may when `push_delta` last looked: their readers are too
            slow.
    """

    def __init__(
        self, max_stream_bytes: int = MAX_STREAM_BYTES, max_bytes: int = MAX_SESSION_BYTES
    ) -> None:
        self._max_stream_bytes, self._max_bytes = max_stream_bytes, max_bytes
        self._sealed: deque[_Segment] = deque()
        self._growing = _Segment()
        self._sealed_bytes = 0
        self._stream_bytes: Counter[int] = Counter()
        self._posted = asyncio.Event()
        self.slow_streams: list[int] = []

    @property
    def empty(self) -> bool:
        return not self._sealed and not self._growing.entries

    @property
    def num_bytes(self) -> int:
        return self._sealed_bytes + self._growing.num_bytes

    @property
    def overfull(self) -> bool:
        """Whether the session as a whole holds more than it may."""
        return self.num_bytes > self._max_bytes

    def wake(self) -> None:
        """Lets `take` return, with nothing if need be."""
        self._posted.set()

    def push_delta(self, stream: int, delta: common_pb2.TokenDelta) -> bool:
        """Adds tokens; they follow all that the stream was given before.

        Returns:
            Whether so much has come to wait that `slow_streams` and `overfull` want a look.
        """
        data, growing = delta.SerializeToString(), self._growing
        if not growing.entries:
            self._posted.set()
        growing.entries.append((stream, data))
        growing.num_bytes += len(data) + _ENTRY_BYTES
        if growing.num_bytes <= _SEGMENT_BYTES:
            return False
        self._seal()
        return True

    def push(
        self, stream: int, payload: inference_pb2.Accepted | inference_pb2.Finished | BatonError
    ) -> None:
        """Adds an event other than tokens."""
        if isinstance(payload, BatonError):
            event = inference_pb2.SessionEvent(stream=stream, failed=to_message(payload))
        elif isinstance(payload, inference_pb2.Accepted):
            event = inference_pb2.SessionEvent(stream=stream, accepted=payload)
        else:
            event = inference_pb2.SessionEvent(stream=stream, finished=payload)
        self._growing.entries.append((stream, event))
        self._growing.num_bytes += event.ByteSize() + _ENTRY_BYTES
        self._posted.set()

    def clear(self) -> None:
        """Gives up what waits; `take` returns with nothing."""
        self._sealed.clear()
        self._stream_bytes.clear()
        self._sealed_bytes, self._growing = 0, _Segment()
        self._posted.set()

    async def take(self) -> list[Entry]:
        """Waits for events and takes out as many, oldest first, as one message may hold."""
        await self._posted.wait()
        taken: list[Entry] = []
        num_bytes = 0
        while self._sealed and (
            not taken or num_bytes + self._sealed[0].num_bytes <= _MAX_BATCH_BYTES
        ):
            segment = self._sealed.popleft()
            taken += segment.entries
            num_bytes += segment.num_bytes
            self._sealed_bytes -= segment.num_bytes
            self._stream_bytes -= segment.stream_bytes
        if not self._sealed and (
            not taken or num_bytes + self._growing.num_bytes <= _MAX_BATCH_BYTES
        ):
            taken += self._growing.entries
            self._growing = _Segment()
        if self.empty:
            self._posted.clear()
        return taken

    def _seal(self) -> None:
        """Nothing is added to the growing segment any more."""
        segment, self._growing = self._growing, _Segment()
        segment.entries = coalesced(segment.entries)
        segment.num_bytes = 0
        for stream, payload in segment.entries:
            if isinstance(payload, bytes):
                segment.stream_bytes[stream] += len(payload)
                segment.num_bytes += len(payload) + _ENTRY_BYTES
            else:
                segment.num_bytes += payload.ByteSize() + _ENTRY_BYTES
        self._sealed.append(segment)
        self._sealed_bytes += segment.num_bytes
        self._stream_bytes += segment.stream_bytes
        self.slow_streams = [
            stream
            for stream in segment.stream_bytes
            if self._stream_bytes[stream] > self._max_stream_bytes
        ]
