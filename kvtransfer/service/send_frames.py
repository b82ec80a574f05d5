"""The frames of a send, built from the runs of blocks that the engine filled."""

from __future__ import annotations

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Extent
from baton.kvtransfer.frames import FrameKind, position_digest
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.send_state import FilledRun, Send, SendState
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.v1 import kv_transfer_pb2 as pb


def open_frame(send: Send, layout: KvLayout, now: float) -> OutgoingFrame:
    """Returns the frame that opens the current epoch of a send."""
    message = pb.HandoffOpen(
        handoff_id=send.handoff_id,
        epoch=send.epoch,
        fingerprint=layout.fingerprint(),
        num_blocks=send.num_blocks,
        num_tokens=send.num_tokens,
        wait_ms=max(0, round((send.wait_until - now) * 1000)),
        offers=send.offers,
    )
    return OutgoingFrame(frames.encode_open(message), memoryview(b""))


def commit_frame(send: Send, shard: int) -> OutgoingFrame:
    """Returns the frame that commits one shard with its totals."""
    totals = send.totals[shard].encode()
    commit = frames.encode(FrameKind.COMMIT, send.handoff_id, send.epoch, totals, shard=shard)
    return OutgoingFrame(commit, memoryview(b""))


def outgoing_blocks(
    send: Send, filled: FilledRun, extent: Extent, layout: KvLayout, memory: memoryview
) -> OutgoingBlocks:
    """Returns a run of filled blocks with its place in the segment, and adds it to the totals."""
    num_bytes = filled.num_blocks * layout.group_of(filled.layer).block_bytes
    start = extent.offset + layout.offset(
        filled.shard, filled.layer, filled.first_block, send.num_blocks
    )
    digest = position_digest(
        filled.shard, filled.layer, filled.first_block, filled.num_blocks, filled.checksum
    )
    send.totals[filled.shard] = send.totals[filled.shard].plus(num_bytes, digest)
    return OutgoingBlocks(
        send.handoff_id,
        send.epoch,
        filled.shard,
        filled.layer,
        filled.first_block,
        filled.num_blocks,
        filled.checksum,
        start,
        memory[start : start + num_bytes],
    )


def fill_problem(send: Send, filled: pb.LocalFrame, layout: KvLayout) -> str | None:
    """Returns why a rank's notification is wrong; None when it names bytes of the send's extent."""
    if send.state is SendState.WAITING:
        return "filled before its staging was reserved"
    if filled.shard >= layout.num_shards or filled.layer >= layout.num_all_layers:
        return f"shard {filled.shard}, layer {filled.layer} were filled: no such shard or layer"
    if filled.stage >= layout.pp_size:
        return f"stage {filled.stage} filled blocks; there are {layout.pp_size} stages"
    group = layout.group_of(filled.layer)
    held = layout.blocks(group, send.num_blocks)
    end = filled.first_block + filled.num_blocks
    if filled.num_blocks and (filled.first_block < held.start or end > held.stop):
        return (
            f"layer {filled.layer}, blocks {filled.first_block} to {end} were filled; the handoff "
            f"has {held.start} to {held.stop}"
        )
    num_bytes = filled.num_blocks * group.block_bytes
    if num_bytes > frames.MAX_PAYLOAD_BYTES:
        return f"a frame of {num_bytes} bytes was filled; at most {frames.MAX_PAYLOAD_BYTES}"
    if (filled.shard, filled.stage) not in send.writers:
        return f"shard {filled.shard} filled more after its last frame"
    return None
