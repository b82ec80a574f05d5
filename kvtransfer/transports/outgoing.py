"""Frames that leave a sender, and the runs of blocks that transports turn into frames."""

from __future__ import annotations

from dataclasses import dataclass

from baton.kvtransfer import frames
from baton.kvtransfer.frames import FrameKind


@dataclass(frozen=True, slots=True)
class OutgoingFrame:
    """A frame to send now. The payload is staging: copy it before anything else can happen."""

    header: bytes
    payload: memoryview


@dataclass(frozen=True, slots=True)
class OutgoingBlocks:
    """A run of blocks of one layer of one shard that leaves now.

    Attributes:
        checksum: XXH3-64 of the bytes.
        offset: Where the bytes are in the sender's segment.
        payload: The bytes, a view of the segment.
    """

    handoff_id: bytes
    epoch: int
    shard: int
    layer: int
    first_block: int
    num_blocks: int
    checksum: int
    offset: int
    payload: memoryview

    def data_frame(self) -> OutgoingFrame:
        """Returns the frame that carries the bytes."""
        header = frames.encode_header(
            FrameKind.DATA,
            self.handoff_id,
            self.epoch,
            shard=self.shard,
            layer=self.layer,
            first_block=self.first_block,
            num_blocks=self.num_blocks,
            payload_bytes=len(self.payload),
            payload_checksum=self.checksum,
        )
        return OutgoingFrame(header, self.payload)

    def reference(self) -> OutgoingFrame:
        """Returns the frame that says where the bytes are in the sender's segment."""
        reference = frames.encode_reference(
            self.handoff_id,
            self.epoch,
            self.offset,
            shard=self.shard,
            layer=self.layer,
            first_block=self.first_block,
            num_blocks=self.num_blocks,
            blocks_checksum=self.checksum,
        )
        return OutgoingFrame(reference, memoryview(b""))
