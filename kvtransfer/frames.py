"""Frames, the units that travel on the stream of a handoff: each is a fixed header and a payload.

A message of the stream is one or more whole frames. The header (60 bytes, little-endian) is

    magic 4s | version u8 | kind u8 | shard u16 | layer u32 | first_block u32 | num_blocks u32 |
    epoch u32 | payload_bytes u32 | payload checksum u64 | handoff id 16s | header checksum u64

Both checksums are XXH3-64. The header's checksum covers all bytes before it, including the
payload's checksum, so every changed bit of a frame is detected. A reference stands for a data frame
whose bytes the receiver reads from the sender's segment: its payload is their offset, and its
payload checksum is the checksum of the blocks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.layout import PROTOCOL_VERSION
from baton.runtime.network.rpc import MAX_FRAME_BYTES
from baton.v1 import kv_transfer_pb2

HANDOFF_ID_BYTES = 16
MAGIC = b"BTKV"
# Target size of one frame's payload in bytes: large enough to cost little per byte, small enough to
# be sent while the next frame is filled.
FRAME_TARGET_BYTES = 2 * 2**20
# Largest payload of an open in bytes. The longest part of a correct open is the metadata of a NIXL
# agent, some hundred bytes for each network device.
MAX_OPEN_BYTES = 2**18
# Largest payload of one frame in bytes.
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - 2**20

_FIELDS = struct.Struct("<4sBBHIIIIIQ16s")
_CHECKSUM = struct.Struct("<Q")
_POSITION = struct.Struct("<IIIIQ")
_TOTALS = struct.Struct("<QQQ")
_OFFSET = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MODULUS = 2**64
# Bytes that are copied at a time; the checksum then reads them from the core's cache.
COPY_BYTES = 2**18
_NOTHING = memoryview(b"")


class FrameKind(IntEnum):
    """Kinds of frames; the numbers are on the wire."""

    # The payload is a HandoffOpen.
    OPEN = 1
    # The payload is num_blocks blocks of one layer of one shard. The layer names the group, whose
    # blocks are counted from the handoff's first token on.
    DATA = 2
    # The payload is one shard's Totals.
    COMMIT = 3
    # The handoff is over; no payload.
    ABORT = 4
    # Like DATA, but the payload is the blocks' offset in the sender's segment.
    REFERENCE = 5


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame. The payload is a view of the message that carried the frame."""

    kind: FrameKind
    handoff_id: bytes
    epoch: int
    shard: int = 0
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    checksum: int = 0
    payload: memoryview = _NOTHING

    def source(self) -> int:
        """Returns the offset that a reference names. Raises MalformedFrame."""
        if len(self.payload) != _OFFSET.size:
            raise MalformedFrame(f"reference of {len(self.payload)} bytes; must be {_OFFSET.size}")
        (offset,) = _OFFSET.unpack(self.payload)
        return int(offset)


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the data frames of one shard in one epoch; independent of their order.

    Attributes:
        num_bytes: Bytes of all payloads.
        digest: Sum modulo 2**64 of the `position_digest` of every data frame.
    """

    num_frames: int = 0
    num_bytes: int = 0
    digest: int = 0

    def plus(self, num_bytes: int, digest: int) -> Totals:
        """Returns the totals with one more frame."""
        return Totals(
            self.num_frames + 1, self.num_bytes + num_bytes, (self.digest + digest) % _MODULUS
        )

    def encode(self) -> bytes:
        return _TOTALS.pack(self.num_frames, self.num_bytes, self.digest)

    @classmethod
    def decode(cls, payload: memoryview) -> Totals:
        """Parses a commit's payload. Raises MalformedFrame when its size is wrong."""
        if len(payload) != _TOTALS.size:
            raise MalformedFrame(f"commit of {len(payload)} bytes; must be {_TOTALS.size}")
        return cls(*_TOTALS.unpack(payload))


def checksum(data: bytes | bytearray | memoryview) -> int:
    """Returns the XXH3-64 of a frame's payload."""
    return int(xxhash.xxh3_64_intdigest(data))


def copy(target: memoryview, source: memoryview, digest: xxhash.xxh3_64 | None = None) -> int:
    """Copies bytes, and returns their checksum; or that of `digest`'s bytes and these."""
    digest = xxhash.xxh3_64() if digest is None else digest
    for begin in range(0, len(source), COPY_BYTES):
        part = source[begin : begin + COPY_BYTES]
        target[begin : begin + COPY_BYTES] = part
        digest.update(part)
    return int(digest.intdigest())


def position_digest(shard: int, layer: int, first_block: int, num_blocks: int, value: int) -> int:
    """Returns a digest of a frame's place and checksum; commits carry the sum of these digests."""
    return checksum(_POSITION.pack(shard, layer, first_block, num_blocks, value))


def encode_header(
    kind: FrameKind,
    handoff_id: bytes,
    epoch: int,
    *,
    shard: int = 0,
    layer: int = 0,
    first_block: int = 0,
    num_blocks: int = 0,
    payload_bytes: int = 0,
    payload_checksum: int = 0,
) -> bytes:
    """Returns a frame's header; payload_bytes of payload follow it on the wire."""
    fields = _FIELDS.pack(
        MAGIC,
        PROTOCOL_VERSION,
        kind,
        shard,
        layer,
        first_block,
        num_blocks,
        epoch,
        payload_bytes,
        payload_checksum,
        handoff_id,
    )
    return fields + _CHECKSUM.pack(checksum(fields))


def encode(
    kind: FrameKind,
    handoff_id: bytes,
    epoch: int,
    payload: bytes = b"",
    *,
    shard: int = 0,
    layer: int = 0,
    first_block: int = 0,
    num_blocks: int = 0,
) -> bytes:
    """Returns a whole small frame: an open, a commit or an abort (in tests also data)."""
    header = encode_header(
        kind,
        handoff_id,
        epoch,
        shard=shard,
        layer=layer,
        first_block=first_block,
        num_blocks=num_blocks,
        payload_bytes=len(payload),
        payload_checksum=checksum(payload),
    )
    return header + payload


def encode_reference(
    handoff_id: bytes,
    epoch: int,
    offset: int,
    *,
    shard: int,
    layer: int,
    first_block: int,
    num_blocks: int,
    blocks_checksum: int,
) -> bytes:
    """Returns a whole reference frame: the offset of blocks in the sender's segment."""
    header = encode_header(
        FrameKind.REFERENCE,
        handoff_id,
        epoch,
        shard=shard,
        layer=layer,
        first_block=first_block,
        num_blocks=num_blocks,
        payload_bytes=_OFFSET.size,
        payload_checksum=blocks_checksum,
    )
    return header + _OFFSET.pack(offset)


def encode_open(message: kv_transfer_pb2.HandoffOpen) -> bytes:
    """Returns the frame that begins an epoch of a handoff."""
    payload = message.SerializeToString()
    return encode(FrameKind.OPEN, message.handoff_id, message.epoch, payload)


def decode(message: bytes | memoryview) -> Iterator[Frame]:
    """Yields the frames of one message, with all checks except the payloads' checksums (`verify`).

    Raises:
        MalformedFrame: The message is not a sequence of frames; the frames before were yielded.
    """
    view = memoryview(message)
    if not view:
        raise MalformedFrame("empty message; must hold at least one frame")
    while view:
        if len(view) < HEADER_BYTES:
            raise MalformedFrame(f"{len(view)} bytes; a frame's header has {HEADER_BYTES}")
        fields = view[: _FIELDS.size]
        (
            magic,
            version,
            kind,
            shard,
            layer,
            first_block,
            num_blocks,
            epoch,
            payload_bytes,
            payload_checksum,
            handoff_id,
        ) = _FIELDS.unpack(fields)
        if magic != MAGIC:
            raise MalformedFrame(f"magic is {magic!r}; must be {MAGIC!r}")
        (header_checksum,) = _CHECKSUM.unpack_from(view, _FIELDS.size)
        if checksum(fields) != header_checksum:
            raise MalformedFrame(
                "the header's checksum does not match", kv_transfer_pb2.REFUSAL_REASON_CHECKSUM
            )
        if version != PROTOCOL_VERSION:
            raise MalformedFrame(f"protocol version is {version}; must be {PROTOCOL_VERSION}")
        if kind not in FrameKind.__members__.values():
            raise MalformedFrame(f"kind is {kind}; must be 1 to {len(FrameKind)}")
        if len(view) - HEADER_BYTES < payload_bytes:
            raise MalformedFrame(
                f"truncated: {len(view) - HEADER_BYTES} bytes of a payload of {payload_bytes}"
            )
        end = HEADER_BYTES + payload_bytes
        payload, view = view[HEADER_BYTES:end], view[end:]
        yield Frame(
            FrameKind(kind),
            handoff_id,
            epoch,
            shard,
            layer,
            first_block,
            num_blocks,
            payload_checksum,
            payload,
        )


def verify(frame: Frame) -> bool:
    """Returns whether the payload matches its checksum."""
    return checksum(frame.payload) == frame.checksum
