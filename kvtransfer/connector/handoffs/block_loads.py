"""Copies received blocks from staging into the engine's cache, and verifies them after the copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton.kvtransfer.connector.handoffs.block_copies import BlockCopies, LayerRun, Run
from baton.kvtransfer.connector.handoffs.handoff_step import Part
from baton.kvtransfer.connector.handoffs.notifier import Copy
from baton.kvtransfer.engine_port import Claim
from baton.kvtransfer.frames import checksum
from baton.kvtransfer.head_ranges import HeadRange
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Check:
    """A copied frame whose checksum is still to be verified.

    Attributes:
        copy: A copy that the frame is part of; it may still be under way.
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


class _UncopiedFrame(NamedTuple):
    """A frame whose copy has not begun: the fields of its Check without the copy."""

    checksum: int
    offset: int
    num_bytes: int
    block_ids: Sequence[int]


class _JoinedScatter:
    """Collects runs of blocks until they are large enough for one copy.

    Args:
        copies: This rank's copies.
    """

    def __init__(self, copies: BlockCopies) -> None:
        self._copies = copies
        self._runs, self._frames, self._num_bytes = list[LayerRun](), list[_UncopiedFrame](), 0

    def add(
        self, run: LayerRun, num_bytes: int, frames: Iterable[_UncopiedFrame]
    ) -> Iterator[Check]:
        """Adds a run of blocks, and the frames that it is part of.

        Yields the checks of the copies that this begins.
        """
        if self._runs and self._num_bytes + num_bytes > self._copies.joined_bytes:
            yield from self.begin()
        self._runs.append(run)
        self._frames += frames
        self._num_bytes += num_bytes
        if self._num_bytes >= self._copies.joined_bytes:
            yield from self.begin()

    def begin(self) -> Iterator[Check]:
        """Begins the copy of the collected runs, if there are any; yields the checks."""
        runs, frames = self._runs, self._frames
        self._runs, self._frames, self._num_bytes = [], [], 0
        if runs:
            copy = self._copies.scatter(runs)
            yield from (Check(copy, *frame) for frame in frames)


def _held_blocks(frame: kv_transfer_pb2.LocalFrame) -> range:
    """Returns the blocks of a frame, as indices within the handoff."""
    return range(frame.first_block, frame.first_block + frame.num_blocks)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _batched(
    frames: Iterable[kv_transfer_pb2.LocalFrame], copies: BlockCopies
) -> Iterator[list[kv_transfer_pb2.LocalFrame]]:
    """Yields batches of frames whose blocks follow each other in one layer and fit in one copy."""
    batch: list[kv_transfer_pb2.LocalFrame] = []
    after, room = (-1, 0), 0
    for frame in frames:
        if batch and ((frame.layer, frame.first_block) != after or frame.num_blocks > room):
            yield batch
            batch = []
        if not batch:
            room = copies.max_blocks(frame.layer)
        batch.append(frame)
        room -= frame.num_blocks
        after = frame.layer, frame.first_block + frame.num_blocks
    if batch:
        yield batch


def _wanted_blocks(held: range, group: KvGroup, part: Part) -> Iterator[tuple[int, range]]:
    """Yields the blocks that are both held and wanted.

    Each item is an index in the part's block_ids, and the blocks from there on as indices within
    the handoff. The one block of a state goes to each of the part's blocks.
    """
    if group.kind == "state":
        yield from ((at, range(1)) for at in range(len(part.block_ids)))
        return
    wanted = _common(held, range(part.first_block, part.first_block + len(part.block_ids)))
    if wanted:
        yield wanted.start - part.first_block, wanted


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
    joined = _JoinedScatter(copies)
    # A draft's layers come last; this engine may have no draft.
    known = (frame for frame in claimed.frames if frame.layer < layout.num_all_layers)
    for batch in _batched(known, copies):
        layer = batch[0].layer
        group = layout.group_of(layer)
        part = parts[group.table]
        come = range(batch[0].first_block, _held_blocks(batch[-1]).stop)
        for begin, wanted in _wanted_blocks(come, group, part):
            run = Run(begin, len(wanted), _staged_at(claimed, layout, layer, wanted.start))
            frames = _frames_with(
                wanted, part.block_ids[begin : begin + len(wanted)], batch, claimed, layout
            )
            yield from joined.add(
                LayerRun(layer, prepared[group.table], run, heads.get(group)),
                len(wanted) * group.block_bytes,
                frames,
            )
    yield from joined.begin()


def _staged_at(claimed: Claim, layout: KvLayout, layer: int, block: int) -> int:
    """Returns where a block of the handoff begins in the segment."""
    return claimed.offset + layout.offset(0, layer, block, claimed.num_blocks)


def _frames_with(
    wanted: range,
    block_ids: Sequence[int],
    batch: Iterable[kv_transfer_pb2.LocalFrame],
    claimed: Claim,
    layout: KvLayout,
) -> Iterator[_UncopiedFrame]:
    """Yields the frames of a batch that hold some of the wanted blocks.

    Args:
        wanted: Neighbouring blocks, as indices within the handoff.
        block_ids: The blocks of the engine's cache that they go to.
        batch: Frames of one layer.
        claimed: The claimed staging.
        layout: Layout of the sender's KV cache.
    """
    for frame in batch:
        if both := _common(_held_blocks(frame), wanted):
            first = both.start - wanted.start
            yield _UncopiedFrame(
                frame.checksum,
                _staged_at(claimed, layout, frame.layer, frame.first_block),
                frame.num_blocks * layout.group_of(frame.layer).block_bytes,
                block_ids[first : first + len(both)],
            )


def holds(check: Check, memory: memoryview) -> bool:
    """Waits for the copy; returns whether the copied bytes are those the sender read.

    Any thread may call it; hashing releases the interpreter lock.

    The checksum is verified after the copy: staging that is right now was right during the copy.
    """
    check.copy.wait()
    data = memory[check.offset : check.offset + check.num_bytes]
    return checksum(data) == check.checksum
