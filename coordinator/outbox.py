"""What a client session is still to be told: bounded, however slowly it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from baton.runtime.errors import BatonError, to_message
from baton.v1 import common_pb2, inference_pb2

# Of one stream's tokens that wait for the reader, and of everything that waits.
MAX_STREAM_BYTES = 1 * 2**20
MAX_SESSION_BYTES = 64 * 2**20
# What an event takes beside its payload, about.
_EVENT_BYTES = 512
# One message; a client's own limit is several times that.
_MAX_BATCH_BYTES = 2 * 2**20

Payload = inference_pb2.Accepted | common_pb2.TokenDelta | inference_pb2.Finished | BatonError


@dataclass(slots=True)
class Pending:
    """One event of one stream, not written yet."""

    stream: int
    payload: Payload
    num_bytes: int

    def session_event(self) -> inference_pb2.SessionEvent:
        payload = self.payload
        if isinstance(payload, common_pb2.TokenDelta):
            return inference_pb2.SessionEvent(stream=self.stream, delta=payload)
        if isinstance(payload, inference_pb2.Accepted):
            return inference_pb2.SessionEvent(stream=self.stream, accepted=payload)
        if isinstance(payload, inference_pb2.Finished):
            return inference_pb2.SessionEvent(stream=self.stream, finished=payload)
        return inference_pb2.SessionEvent(stream=self.stream, failed=to_message(payload))


class Outbox:
    """Events in order; while they wait, a stream's token deltas grow into one.

    Everything that one worker message gave the session is here before its writer runs, so it
    leaves as one batch.

    Args:
        max_stream_bytes: of one stream's waiting tokens.
        max_bytes: of everything waiting.
    """

    def __init__(
        self, max_stream_bytes: int = MAX_STREAM_BYTES, max_bytes: int = MAX_SESSION_BYTES
    ) -> None:
        self._max_stream_bytes, self._max_bytes = max_stream_bytes, max_bytes
        self._pending: deque[Pending] = deque()
        self._deltas: dict[int, Pending] = {}
        self._num_bytes = 0
        self._posted = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def overfull(self) -> bool:
        """Whether the session as a whole holds more than it may."""
        return self._num_bytes > self._max_bytes

    def wake(self) -> None:
        """Lets `take` return, with nothing if need be."""
        self._posted.set()

    def push_delta(self, stream: int, delta: common_pb2.TokenDelta) -> bool:
        """Adds tokens; they follow all that the stream was given before.

        Returns:
            False when the stream now holds more than it may: its reader is too slow.
        """
        num_bytes = delta.ByteSize()
        self._num_bytes += num_bytes
        waiting = self._deltas.get(stream)
        if waiting is None:
            self._deltas[stream] = waiting = Pending(stream, delta, num_bytes)
            self._pending.append(waiting)
            self._posted.set()
        else:
            merged = waiting.payload
            assert isinstance(merged, common_pb2.TokenDelta)
            merged.token_ids.extend(delta.token_ids)
            merged.text += delta.text
            merged.logprobs.extend(delta.logprobs)
            waiting.num_bytes += num_bytes
        return waiting.num_bytes <= self._max_stream_bytes

    def push(
        self, stream: int, payload: inference_pb2.Accepted | inference_pb2.Finished | BatonError
    ) -> None:
        """Adds an event other than tokens."""
        self._deltas.pop(stream, None)
        num_bytes = _EVENT_BYTES
        num_bytes += len(str(payload)) if isinstance(payload, BatonError) else payload.ByteSize()
        self._num_bytes += num_bytes
        self._pending.append(Pending(stream, payload, num_bytes))
        self._posted.set()

    def clear(self) -> None:
        """Gives up what waits; `take` returns with nothing."""
        self._pending.clear()
        self._deltas.clear()
        self._num_bytes = 0
        self._posted.set()

    async def take(self) -> list[Pending]:
        """Waits for events and takes out as many, oldest first, as one message may hold."""
        await self._posted.wait()
        taken: list[Pending] = []
        num_bytes = 0
        while self._pending:
            num_bytes += self._pending[0].num_bytes
            if taken and num_bytes > _MAX_BATCH_BYTES:
                break
            one = self._pending.popleft()
            if self._deltas.get(one.stream) is one:
                del self._deltas[one.stream]
            self._num_bytes -= one.num_bytes
            taken.append(one)
        if not self._pending:
            self._posted.clear()
        return taken
