"""Answers of a scripted worker, encoded beforehand except for the ID of the request."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from google.protobuf.message import Message

from baton.v1 import cluster_pb2, common_pb2, inference_pb2

MODEL = "bench"
VOCAB_SIZE = 128_256
# Field number and wire type of the repeated field of StepOutputs, and of SessionEvents.
OUTPUTS_TAG, EVENTS_TAG = b"\x12", b"\x0a"
# Field number and wire type of SessionRequest.batch.
BATCH_TAG = b"\x1a"


class Answers:
    """The same tokens for every request, as entries of a batch message.

    Args:
        tag: Tag of the batch's repeated field.
        tokens: For each token, the fields of its entries without the ID of the request.
    """

    def __init__(self, tag: bytes, tokens: Sequence[Sequence[Message]]) -> None:
        self._tag = tag
        self._tails = [[one.SerializeToString() for one in token] for token in tokens]

    def of(self, request: Message, first: int, last: int) -> list[bytes]:
        """Returns the encoded entries of tokens `first` to `last` - 1.

        Args:
            request: An entry with only the ID of the request. Concatenated encodings of protobuf
                messages are merged by the parser.
            first: Index of the first token.
            last: Index after the last token.
        """
        head = request.SerializeToString()
        return [
            b"".join([prefix(self._tag, len(head) + len(tail)) + head + tail for tail in tails])
            for tails in self._tails[first:last]
        ]


class Token(NamedTuple):
    """One token of a request, with the fields of StepTokens."""

    offset: int
    token_id: int
    num_text_chars: int
    delta: bytes


def plain_tokens(num_tokens: int) -> list[Token]:
    return [
        Token(offset, delta.token_ids[0], len(delta.text), delta.SerializeToString())
        for offset, delta in enumerate(map(_delta, range(num_tokens)))
    ]


@functools.lru_cache
def prefix(tag: bytes, num_bytes: int) -> bytes:
    """Returns the prefix of a field with `num_bytes` bytes: its tag, and its length as a varint."""
    length = bytearray(tag)
    while num_bytes > 0x7F:
        length.append(num_bytes & 0x7F | 0x80)
        num_bytes >>= 7
    length.append(num_bytes)
    return bytes(length)


def worker_outputs(role: common_pb2.Role.ValueType, num_tokens: int) -> Answers:
    """Returns entries of StepOutputs; a prefill worker ends its part with the first token."""
    tokens = []
    for offset in range(num_tokens):
        output = cluster_pb2.RequestOutput(delta=_delta(offset))
        if offset < 2:
            output.timings.CopyFrom(cluster_pb2.StageTimings(queue_us=10, run_us=100))
        if offset == num_tokens - 1:
            output.finished.reason = common_pb2.FINISH_REASON_LENGTH
        elif role == common_pb2.ROLE_PREFILL:
            output.finished.SetInParent()
        tokens.append([output])
    return Answers(OUTPUTS_TAG, tokens)


def session_events(num_tokens: int) -> Answers:
    """Returns entries of SessionEvents, as a coordinator would send them."""
    tokens = [[inference_pb2.SessionEvent(delta=_delta(offset))] for offset in range(num_tokens)]
    tokens[0].insert(0, inference_pb2.SessionEvent(accepted=inference_pb2.Accepted(model=MODEL)))
    tokens[-1].append(inference_pb2.SessionEvent(finished=_finished(num_tokens)))
    return Answers(EVENTS_TAG, tokens)


def generate_events(num_tokens: int) -> list[bytes]:
    """Returns all events of one Generate call."""
    events = [inference_pb2.GenerateEvent(delta=_delta(offset)) for offset in range(num_tokens)]
    events.append(inference_pb2.GenerateEvent(finished=_finished(num_tokens)))
    return [event.SerializeToString() for event in events]


def _delta(offset: int) -> common_pb2.TokenDelta:
    token_id = offset * 104_729 % VOCAB_SIZE
    return common_pb2.TokenDelta(offset=offset, token_ids=[token_id], text=" tok")


def _finished(num_tokens: int) -> inference_pb2.Finished:
    usage = common_pb2.Usage(completion_tokens=num_tokens)
    return inference_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
