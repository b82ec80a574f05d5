"""Events of a client session on their way out, encoded once and by hand.

Tokens are most of what a coordinator sends. A delta is encoded when it comes, and from then on it
is bytes that are put together: building messages of them would cost three times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from baton.runtime.errors import from_message
from baton.v1 import common_pb2, inference_pb2

# A stream, and its encoded TokenDelta or another event of it.
Entry: TypeAlias = "tuple[int, bytes | inference_pb2.SessionEvent]"

# Field number and wire type of SessionEvents.events, SessionEvent.stream and SessionEvent.delta.
_EVENTS, _STREAM, _DELTA = 1 << 3 | 2, 1 << 3, 3 << 3 | 2


def encoded(entries: Iterable[Entry]) -> bytes:
    """A SessionEvents message."""
    parts: list[bytes] = []
    for stream, payload in entries:
        if isinstance(payload, bytes):
            event = _field(_STREAM, stream) + _field(_DELTA, len(payload)) + payload
        else:
            event = payload.SerializeToString()
        parts.append(_field(_EVENTS, len(event)))
        parts.append(event)
    return b"".join(parts)


def coalesced(entries: Iterable[Entry]) -> list[Entry]:
    """With each stream's deltas in one, where the first of them was."""
    found: list[tuple[int, list[bytes] | inference_pb2.SessionEvent]] = []
    deltas: dict[int, list[bytes]] = {}
    for stream, payload in entries:
        if not isinstance(payload, bytes):
            # What follows it may not come before it.
            deltas.pop(stream, None)
            found.append((stream, payload))
        elif stream in deltas:
            deltas[stream].append(payload)
        else:
            deltas[stream] = [payload]
            found.append((stream, deltas[stream]))
    return [
        (stream, _merged(payload) if isinstance(payload, list) else payload)
        for stream, payload in found
    ]


def generate_events(entries: Iterable[Entry]) -> Iterator[inference_pb2.GenerateEvent]:
    """The same for a call of Generate.

    Raises:
        BatonError: that the request failed with.
    """
    for _, payload in coalesced(entries):
        if isinstance(payload, bytes):
            delta = common_pb2.TokenDelta.FromString(payload)
            yield inference_pb2.GenerateEvent(delta=delta)
        elif payload.HasField("accepted"):
            yield inference_pb2.GenerateEvent(accepted=payload.accepted)
        elif payload.HasField("finished"):
            yield inference_pb2.GenerateEvent(finished=payload.finished)
        else:
            raise from_message(payload.failed)


def _merged(deltas: list[bytes]) -> bytes:
    """One delta of contiguous ones."""
    if len(deltas) == 1:
        return deltas[0]
    first, *rest = map(common_pb2.TokenDelta.FromString, deltas)
    for delta in rest:
        first.token_ids.extend(delta.token_ids)
        first.logprobs.extend(delta.logprobs)
    # Text at once: text that grows in a message leaves its old self behind in its memory.
    first.text += "".join(delta.text for delta in rest)
    return first.SerializeToString()


@functools.lru_cache(maxsize=2**14)
def _field(tag: int, value: int) -> bytes:
    """A field's tag, and its value or length as a varint."""
    found = bytearray((tag,))
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)
