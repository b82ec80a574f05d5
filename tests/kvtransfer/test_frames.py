import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import FrameKind, Totals
from baton.v1 import kv_transfer_pb2 as pb

ID = bytes(range(16))


def data_frame(payload: bytes = b"k" * 64, **place: int) -> bytes:
    fields = {"shard": 1, "layer": 2, "first_block": 3, "num_blocks": 4, **place}
    return frames.encode(FrameKind.DATA, ID, 7, payload, **fields)


def test_a_message_of_several_frames_decodes_in_order_without_copying():
    message = data_frame(b"one") + frames.encode(FrameKind.COMMIT, ID, 7, b"two", shard=1)
    first, second = frames.decode(message)
    assert (first.kind, first.shard, first.layer, first.first_block, first.num_blocks) == (
        FrameKind.DATA,
        1,
        2,
        3,
        4,
    )
    assert (first.handoff_id, first.epoch, bytes(first.payload)) == (ID, 7, b"one")
    assert (second.kind, bytes(second.payload)) == (FrameKind.COMMIT, b"two")
    assert first.payload.obj is message
    assert frames.verify(first)
    assert frames.verify(second)


@given(st.integers(0, 8 * (frames.HEADER_BYTES + 64) - 1))
def test_every_flipped_bit_is_detected(bit):
    message = bytearray(data_frame())
    message[bit // 8] ^= 1 << bit % 8
    try:
        (frame,) = frames.decode(bytes(message))
    except MalformedFrame:
        return
    assert not frames.verify(frame)


@given(st.integers(0, frames.HEADER_BYTES + 63))
def test_a_truncated_message_is_malformed(length):
    with pytest.raises(MalformedFrame) as caught:
        list(frames.decode(data_frame()[:length]))
    assert caught.value.reason == pb.REFUSAL_REASON_MALFORMED


@given(st.binary(max_size=200))
def test_any_bytes_are_frames_or_malformed(message):
    with pytest.raises(MalformedFrame):
        list(frames.decode(message))


def test_totals_do_not_depend_on_order_and_notice_a_frame_twice():
    digests = [frames.position_digest(0, layer, 0, 2, 1000 + layer) for layer in range(5)]
    forward, backward = Totals(), Totals()
    for digest in digests:
        forward = forward.plus(64, digest)
    for digest in reversed(digests):
        backward = backward.plus(64, digest)
    assert forward == backward
    assert forward.plus(64, digests[0]).digest != forward.digest
    assert Totals.decode(memoryview(forward.encode())) == forward
    with pytest.raises(MalformedFrame):
        Totals.decode(memoryview(b"short"))
