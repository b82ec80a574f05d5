"""Checks of the frames that reach the receiver."""

from __future__ import annotations

from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import Frame, FrameKind, Totals, verify
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.receive_state import Handoff, ReceiveState, ShardProgress
from baton.v1 import kv_transfer_pb2 as pb


def data_problem(handoff: Handoff, frame: Frame, layout: KvLayout) -> str | None:
    """Returns what is wrong with a data frame or a reference; None when it is right."""
    if handoff.state is not ReceiveState.RECEIVING:
        return "a data frame before the handoff was opened"
    if frame.shard >= layout.num_shards:
        return f"shard is {frame.shard}; must be below {layout.num_shards}"
    if frame.layer >= layout.num_all_layers:
        return f"layer is {frame.layer}; must be below {layout.num_all_layers}"
    group = layout.group_of(frame.layer)
    held = layout.blocks(group, handoff.num_blocks)
    end = frame.first_block + frame.num_blocks
    if frame.num_blocks < 1 or frame.first_block < held.start or end > held.stop:
        return (
            f"layer {frame.layer}, blocks {frame.first_block} to {end}; the handoff has "
            f"{held.start} to {held.stop}"
        )
    num_bytes = frame.num_blocks * group.block_bytes
    if frame.kind is FrameKind.REFERENCE:
        problem = _reference_problem(handoff, frame, num_bytes)
        if problem is not None:
            return problem
    elif len(frame.payload) != num_bytes:
        return (
            f"{len(frame.payload)} bytes for {frame.num_blocks} blocks; "
            f"must be {frame.num_blocks * group.block_bytes}"
        )
    progress = handoff.shards[frame.shard]
    if progress.promised is not None:
        return f"a data frame after shard {frame.shard}'s commit"
    first = layout.index(frame.layer, frame.first_block, handoff.num_blocks)
    if progress.seen.find(1, first, first + frame.num_blocks) != -1:
        return f"layer {frame.layer}, blocks {frame.first_block} to {end}: came twice"
    return None


def _reference_problem(handoff: Handoff, frame: Frame, num_bytes: int) -> str | None:
    limit = handoff.choice.source_bytes
    if not limit:
        return f"a reference by {handoff.choice.transport}, which carries the bytes themselves"
    try:
        begin = frame.source()
    except MalformedFrame as error:
        return str(error)
    if begin + num_bytes > limit:
        end = begin + num_bytes
        return f"reference to bytes {begin} to {end}; the sender's segment has {limit}"
    return None


def promised_totals(handoff: Handoff, frame: Frame, layout: KvLayout) -> Totals:
    """Returns the totals of a shard's commit.

    Raises:
        MalformedFrame: The commit is wrong or altered.
    """
    if handoff.state is not ReceiveState.RECEIVING or frame.shard >= layout.num_shards:
        raise MalformedFrame(f"a commit of shard {frame.shard} while {handoff.state.name}")
    if handoff.shards[frame.shard].promised is not None:
        raise MalformedFrame(f"shard {frame.shard} was committed before")
    if not verify(frame):
        raise MalformedFrame("the commit was altered", pb.REFUSAL_REASON_CHECKSUM)
    return Totals.decode(frame.payload)


def missing(progress: ShardProgress, shard: int, expected: int) -> str | None:
    """Returns how a shard's commit differs from what arrived of that shard; None when it does not.

    Args:
        progress: What arrived of it; its commit has come and none of its pulls is outstanding.
        shard: Index of the shard.
        expected: Number of blocks of one shard of the handoff.
    """
    if progress.promised == progress.totals and progress.num_seen == expected:
        return None
    return (
        f"shard {shard}: the commit says {progress.promised}; {progress.totals} arrived, "
        f"{progress.num_seen} of {expected} blocks"
    )
