"""Checks of the frames that reach the receiver."""

from __future__ import annotations

from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import Frame, Totals, verify
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.receiving import Handoff, ReceiveState
from baton.v1 import kv_transfer_pb2 as pb


def data_problem(handoff: Handoff, frame: Frame, layout: KvLayout) -> str | None:
    """Returns what is wrong with a data frame's place or size; None when both are right."""
    if handoff.state is not ReceiveState.RECEIVING:
        return "a data frame before the handoff was opened"
    if frame.rank >= layout.num_shards:
        return f"rank is {frame.rank}; must be below {layout.num_shards}"
    if frame.layer >= layout.num_layers:
        return f"layer is {frame.layer}; must be below {layout.num_layers}"
    group = layout.group_of(frame.layer)
    held = layout.blocks(group, handoff.num_blocks)
    end = frame.first_block + frame.num_blocks
    if frame.num_blocks < 1 or frame.first_block < held.start or end > held.stop:
        return (
            f"layer {frame.layer}, blocks {frame.first_block} to {end}; the handoff has "
            f"{held.start} to {held.stop}"
        )
    if len(frame.payload) != frame.num_blocks * group.block_bytes:
        return (
            f"{len(frame.payload)} bytes for {frame.num_blocks} blocks; "
            f"must be {frame.num_blocks * group.block_bytes}"
        )
    part = handoff.ranks[frame.rank]
    if part.committed:
        return f"a data frame after rank {frame.rank}'s commit"
    first = layout.index(frame.layer, frame.first_block, handoff.num_blocks)
    if part.seen.find(1, first, first + frame.num_blocks) != -1:
        return f"layer {frame.layer}, blocks {frame.first_block} to {end}: came twice"
    return None


def check_commit(handoff: Handoff, frame: Frame, layout: KvLayout) -> None:
    """Checks that a rank's commit matches what arrived of that rank.

    Raises:
        MalformedFrame: The commit is wrong, altered, or blocks are missing.
    """
    if handoff.state is not ReceiveState.RECEIVING or frame.rank >= layout.num_shards:
        raise MalformedFrame(f"a commit of rank {frame.rank} while {handoff.state.name}")
    part = handoff.ranks[frame.rank]
    if part.committed:
        raise MalformedFrame(f"rank {frame.rank} was committed before")
    if not verify(frame):
        raise MalformedFrame("the commit was altered", pb.REFUSAL_REASON_CHECKSUM)
    totals = Totals.decode(frame.payload)
    expected = layout.shard_blocks(handoff.num_blocks)
    if totals != part.totals or part.num_seen != expected:
        raise MalformedFrame(
            f"rank {frame.rank}: the commit says {totals}; {part.totals} arrived, "
            f"{part.num_seen} of {expected} blocks",
            pb.REFUSAL_REASON_INCOMPLETE,
        )
