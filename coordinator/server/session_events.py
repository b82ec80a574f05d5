"""Encodes the events of client sessions by hand, for speed.

Most of the coordinator's output is tokens. They are encoded once per worker message and session,
and then kept as bytes. Concatenated encodings of a protobuf message are equal to the encoding of
the merged message, so batches are formed by joining bytes. Building protobuf messages would cost
three times as much.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from baton.coordinator.state.requests import StreamKey
from baton.runtime.errors import BatonError, from_message, to_message
from baton.runtime.network.wire import field, length_tag, varint_tag
from baton.v1 import common_pb2, inference_pb2

Event: TypeAlias = inference_pb2.Accepted | inference_pb2.Finished | BatonError

_EVENTS = length_tag(inference_pb2.SessionEvents.DESCRIPTOR, "events")
_STREAM = varint_tag(inference_pb2.SessionEvent.DESCRIPTOR, "stream")
_DELTA, _ACCEPTED, _FINISHED, _FAILED = (
    length_tag(inference_pb2.SessionEvent.DESCRIPTOR, name)
    for name in ("delta", "accepted", "finished", "failed")
)
_GENERATE_DELTA = length_tag(inference_pb2.GenerateEvent.DESCRIPTOR, "delta")
# Headers are cached below this size; tokens with logprobs are larger, with varying sizes.
_MAX_CACHED_BYTES = 128


def encoded_deltas(deltas: Iterable[tuple[StreamKey, bytes]]) -> dict[int, bytes]:
    """Wraps encoded tokens into one encoded SessionEvents message per session number."""
    found: dict[int, list[bytes]] = {}
    number, parts = -1, list[bytes]()
    for to, data in deltas:
        if to.session != number:
            number = to.session
            parts = found.setdefault(number, [])
        heads, num_bytes = _delta_heads(to.stream), len(data)
        head = heads.get(num_bytes)
        if head is None:
            head = _head(to.stream, _DELTA, num_bytes)
            if num_bytes < _MAX_CACHED_BYTES:
                heads[num_bytes] = head
        parts.append(head)
        parts.append(data)
    return {session: b"".join(parts) for session, parts in found.items()}


def encoded_event(stream: int, event: Event) -> bytes:
    """An encoded SessionEvents message with one event other than tokens."""
    if isinstance(event, BatonError):
        tag, data = _FAILED, to_message(event).SerializeToString()
    else:
        tag = _ACCEPTED if isinstance(event, inference_pb2.Accepted) else _FINISHED
        data = event.SerializeToString()
    return _head(stream, tag, len(data)) + data


def split(batch: bytes) -> list[bytes]:
    """Splits an encoded batch into one encoded batch per event."""
    events = inference_pb2.SessionEvents.FromString(batch).events
    return [inference_pb2.SessionEvents(events=[event]).SerializeToString() for event in events]


def coalesced(batch: bytes) -> inference_pb2.SessionEvents:
    """Decodes a batch and merges each stream's deltas at the position of its first delta."""
    found: list[tuple[inference_pb2.SessionEvent, list[common_pb2.TokenDelta]]] = []
    deltas: dict[int, list[common_pb2.TokenDelta]] = {}
    for event in inference_pb2.SessionEvents.FromString(batch).events:
        if not event.HasField("delta"):
            # Later deltas must not move before this event.
            deltas.pop(event.stream, None)
            found.append((event, []))
        elif event.stream in deltas:
            deltas[event.stream].append(event.delta)
        else:
            deltas[event.stream] = []
            found.append((event, deltas[event.stream]))
    for event, more in found:
        if more:
            _extend(event.delta, more)
    return inference_pb2.SessionEvents(events=[event for event, _ in found])


def generate_events(batch: bytes) -> Iterator[tuple[bytes, bool]]:
    """Converts a batch to encoded GenerateEvents, each with a flag for the last event.

    Raises:
        BatonError: The error with which the request failed.
    """
    for event in coalesced(batch).events:
        if event.HasField("delta"):
            data = event.delta.SerializeToString()
            yield field(_GENERATE_DELTA, len(data)) + data, False
        elif event.HasField("accepted"):
            accepted = inference_pb2.GenerateEvent(accepted=event.accepted)
            yield accepted.SerializeToString(), False
        elif event.HasField("finished"):
            finished = inference_pb2.GenerateEvent(finished=event.finished)
            yield finished.SerializeToString(), True
        else:
            raise from_message(event.failed)


def _extend(delta: common_pb2.TokenDelta, more: list[common_pb2.TokenDelta]) -> None:
    """Appends later deltas to the first delta."""
    for one in more:
        delta.token_ids.extend(one.token_ids)
        delta.logprobs.extend(one.logprobs)
    # Joined before the assignment: each assignment of text leaves the old text in the message's
    # memory arena.
    delta.text += "".join(one.text for one in more)


def _head(stream: int, tag: int, num_bytes: int) -> bytes:
    """Encoded header of an event with this tag and size in a SessionEvents message."""
    head = field(_STREAM, stream) + field(tag, num_bytes)
    return field(_EVENTS, len(head) + num_bytes) + head


@functools.lru_cache(maxsize=2**14)
def _delta_heads(stream: int) -> dict[int, bytes]:
    """Returns a stream's cached headers of deltas by size; most deltas have one of few sizes."""
    return {}
