"""Bounded queue of the events that wait for a client session's reader."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from baton.coordinator.server.session_events import Event, coalesced, encoded_event, split
from baton.v1 import inference_pb2

# Limits of waiting bytes: tokens of one stream, and all events of a session.
MAX_STREAM_BYTES = 1 * 2**20
MAX_SESSION_BYTES = 64 * 2**20
# Approximate memory overhead of a batch.
_BATCH_BYTES = 64
# When this much waits, the events are sealed: the tokens of each stream are merged into one event
# and counted.
_SEGMENT_BYTES = 512 * 2**10
# Approximate limit of one message; a client's own limit is several times as large.
_MAX_MESSAGE_BYTES = 2 * 2**20
# Accepted events wait for at most this long to be sent together with other events, because a
# message costs as much as a hundred tokens. They are sent at once when this many wait, for example
# when a client resumes many requests.
_ACCEPTED_WAIT_S = 0.005
_MAX_ACCEPTED_WAITING = 16


@dataclass(slots=True)
class _Segment:
    """Batches in order and their size; stream_bytes is filled when the segment is sealed."""

    batches: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    stream_bytes: Counter[int] = field(default_factory=Counter)

    def add(self, batch: bytes) -> None:
        self.batches.append(batch)
        self.num_bytes += len(batch) + _BATCH_BYTES


class Outbox:
    """Encoded events in order; if many wait, the token deltas of a stream are merged.

    All events from one worker message are pushed before the session's writer runs, so they are
    sent as one batch. Tokens are kept as bytes: a part of a worker's message would keep the whole
    message in memory until the client has read it.

    Args:
        max_stream_bytes: Limit of one stream's waiting tokens.
        max_bytes: Limit of all waiting events.
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
        self._num_accepted_waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._slow_streams: list[int] = []

    @property
    def empty(self) -> bool:
        return not self._sealed and not self._growing.batches

    @property
    def num_bytes(self) -> int:
        return self._sealed_bytes + self._growing.num_bytes

    @property
    def overfull(self) -> bool:
        """Whether the waiting events of the session exceed the limit."""
        return self.num_bytes > self._max_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether an answer of this size leaves half of the session's limit to other events."""
        return 2 * (self.num_bytes + num_bytes) <= self._max_bytes

    def take_slow_streams(self) -> list[int]:
        """Streams over their limit since the last sealing, because their readers are too slow.

        Each is returned once per sealing.
        """
        found, self._slow_streams = self._slow_streams, []
        return [one for one in found if self._stream_bytes[one] > self._max_stream_bytes]

    def wake(self) -> None:
        """Makes `take` return, possibly without events."""
        self._posted.set()

    def push_deltas(self, batch: bytes) -> bool:
        """Adds encoded token deltas after all earlier events of their streams.

        Returns:
            Whether a segment was sealed, so that the caller must check `take_slow_streams` and
            `overfull`.
        """
        self._posted.set()
        has_sealed = False
        # A worker's message may be larger than a segment.
        for part in (batch,) if len(batch) <= _SEGMENT_BYTES else split(batch):
            self._growing.add(part)
            if self._growing.num_bytes > _SEGMENT_BYTES:
                self._seal()
                has_sealed = True
        return has_sealed

    def push(self, stream: int, event: Event) -> None:
        """Adds an event other than tokens; the caller then checks the limits as after tokens."""
        encoded = encoded_event(stream, event)
        if len(encoded) > _SEGMENT_BYTES:
            # Several ends with prompt logprobs would exceed gRPC's limit in one message.
            if self._growing.batches:
                self._seal()
            segment = _Segment()
            segment.add(encoded)
            self._close(segment)
        else:
            self._growing.add(encoded)
            if self._growing.num_bytes > _SEGMENT_BYTES:
                self._seal()
        if not isinstance(event, inference_pb2.Accepted):
            self._posted.set()
            return
        self._num_accepted_waiting += 1
        if self._num_accepted_waiting >= _MAX_ACCEPTED_WAITING:
            self._posted.set()
        elif self._timer is None and not self._posted.is_set():
            self._timer = asyncio.get_running_loop().call_later(_ACCEPTED_WAIT_S, self.wake)

    def clear(self) -> None:
        """Drops all waiting events; `take` returns without events."""
        self._sealed.clear()
        self._stream_bytes.clear()
        self._sealed_bytes, self._growing = 0, _Segment()
        self._posted.set()

    async def take(self) -> bytes:
        """Waits for events and removes as many as fit one message, oldest first.

        Returns:
            An encoded SessionEvents.
        """
        await self._posted.wait()
        self._num_accepted_waiting = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        taken: list[bytes] = []
        num_bytes = 0
        while self._sealed and (
            not taken or num_bytes + self._sealed[0].num_bytes <= _MAX_MESSAGE_BYTES
        ):
            segment = self._sealed.popleft()
            taken += segment.batches
            num_bytes += segment.num_bytes
            self._sealed_bytes -= segment.num_bytes
            self._stream_bytes -= segment.stream_bytes
        if not self._sealed and (
            not taken or num_bytes + self._growing.num_bytes <= _MAX_MESSAGE_BYTES
        ):
            taken += self._growing.batches
            self._growing = _Segment()
        if self.empty:
            self._posted.clear()
        return b"".join(taken)

    def _seal(self) -> None:
        """Merges and closes the growing segment, and starts a new one."""
        growing, segment = self._growing, _Segment()
        self._growing = _Segment()
        events = coalesced(b"".join(growing.batches))
        for event in events.events:
            if event.HasField("delta"):
                segment.stream_bytes[event.stream] += event.delta.ByteSize()
        segment.add(events.SerializeToString())
        self._close(segment)
        self._stream_bytes += segment.stream_bytes
        self._slow_streams = [
            stream
            for stream, num_bytes in self._stream_bytes.items()
            if num_bytes > self._max_stream_bytes
        ]

    def _close(self, segment: _Segment) -> None:
        self._sealed.append(segment)
        self._sealed_bytes += segment.num_bytes
