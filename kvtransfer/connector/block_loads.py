"""Copies received blocks from staging into the engine's cache, and verifies them after the copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from baton.kvtransfer.connector.block_copies import BlockCopies, Run
from baton.kvtransfer.connector.handoff_step import Part
from baton.kvtransfer.connector.notifier import Copy
from baton.kvtransfer.control import Claim, EnginePort, checksum
from baton.kvtransfer.head_ranges import HeadRange
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Check:
    """A copied frame whose checksum is still to be verified.

    Attributes:
        copy: The copy of the frame; it may still be under way.
        checksum: XXH3-64 of the bytes that the sender read from its cache.
        offset: Where the frame begins in the segment.
        num_bytes: Size of the frame in staging.
        block_ids: Blocks of the engine's cache that are wrong if the checksum differs.
    """

    copy: Copy
    checksum: int
    offset: int
    num_bytes: int
    block_ids: Sequence[int]


def _wanted_blocks(
    frame: kv_transfer_pb2.LocalFrame, group: KvGroup, part: Part
) -> Iterator[tuple[int, range]]:
    """Yields the blocks that are both in the frame and wanted.

    Each item is an index in the part's block_ids, and the blocks from there on as indices within
    the handoff. The one block of a state goes to each of the part's blocks.
    """
    if group.kind == "state":
        yield from ((at, range(1)) for at in range(len(part.block_ids)))
        return
    first = max(frame.first_block, part.first_block)
    end = min(frame.first_block + frame.num_blocks, part.first_block + len(part.block_ids))
    if first < end:
        yield first - part.first_block, range(first, end)


def copy_in(
    copies: BlockCopies,
    layout: KvLayout,
    claimed: Claim,
    parts: Sequence[Part],
    heads: Mapping[KvGroup, HeadRange],
) -> Iterator[Check]:
    """Begins the copies of a claim's frames that hold wanted blocks; yields one check per frame.

    Args:
        copies: This rank's copies.
        layout: Layout of the sender's KV cache.
        claimed: The claimed staging.
        parts: The wanted blocks of each block table.
        heads: The wanted heads of the layers of each group; empty: all heads of the blocks.
    """
    prepared = {
        table.table: copies.prepare(part.block_ids)
        for table, part in zip(layout.tables, parts, strict=True)
        if part.block_ids
    }
    for frame in claimed.frames:
        group = layout.group_of(frame.layer)
        part = parts[group.table]

        def staged(block: int, layer: int = frame.layer) -> int:
            return claimed.offset + layout.offset(0, layer, block, claimed.num_blocks)

        for begin, wanted in _wanted_blocks(frame, group, part):
            run = Run(begin, len(wanted), staged(wanted.start))
            blocks, of_group = prepared[group.table], heads.get(group)
            yield Check(
                copies.scatter(frame.layer, blocks, run)
                if of_group is None
                else copies.scatter_heads(frame.layer, blocks, run, of_group),
                frame.checksum,
                staged(frame.first_block),
                frame.num_blocks * group.block_bytes,
                part.block_ids[begin : begin + len(wanted)],
            )


def holds(check: Check, port: EnginePort) -> bool:
    """Waits for the copy; returns whether the copied bytes are those the sender read.

    The checksum is verified after the copy: staging that is right now was right during the copy.
    """
    check.copy.wait()
    data = port.memory[check.offset : check.offset + check.num_bytes]
    return checksum(data) == check.checksum
