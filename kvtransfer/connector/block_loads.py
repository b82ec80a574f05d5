"""Copying what was received from staging into the engine's blocks, verified after the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.kvtransfer.connector.block_copies import BlockCopies, Run
from baton.kvtransfer.connector.early_loads import EarlyLoad, EarlyWork
from baton.kvtransfer.connector.handoff_step import Load
from baton.kvtransfer.connector.notifier import Copy
from baton.kvtransfer.control import Claim, EnginePort, checksum
from baton.kvtransfer.layout import KvLayout
from baton.v1 import kv_transfer_pb2


class FrameKey(NamedTuple):
    """Which bytes a frame of a handoff holds, as its sender says."""

    epoch: int
    layer: int
    first_block: int
    num_blocks: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold of a frame in staging once it has been copied.

    Attributes:
        offset: of the frame in the segment.
        block_ids: of the engine, that are wrong otherwise.
    """

    copy: Copy
    frame: FrameKey
    offset: int
    num_bytes: int
    block_ids: Sequence[int]


def frame_key(claimed: Claim, frame: kv_transfer_pb2.LocalFrame) -> FrameKey:
    """Of a frame of a claim, or of a peek."""
    return FrameKey(claimed.epoch, frame.layer, frame.first_block, frame.num_blocks, frame.checksum)


def wanted_blocks(frame: kv_transfer_pb2.LocalFrame, first_block: int, num_blocks: int) -> range:
    """Those of a frame that are among so many, as indices within the handoff."""
    first = max(frame.first_block, first_block)
    return range(first, min(frame.first_block + frame.num_blocks, first_block + num_blocks))


def copy_in(
    copies: BlockCopies,
    layout: KvLayout,
    claimed: Claim,
    first_block: int,
    block_ids: Sequence[int],
) -> Iterator[Check]:
    """Begins the copies of the frames of a claim, or of a peek, that hold wanted blocks.

    Args:
        copies: of this rank.
        layout: of the cache.
        claimed: what to copy.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache.
    """
    blocks, block_bytes = copies.prepare(block_ids), layout.block_bytes
    for frame in claimed.frames:
        wanted = wanted_blocks(frame, first_block, len(block_ids))
        if not wanted:
            continue
        at, begin = frame.layer * claimed.num_blocks, wanted.start - first_block
        run = Run(begin, len(wanted), claimed.offset + (at + wanted.start) * block_bytes)
        yield Check(
            copies.scatter(frame.layer, blocks, run),
            frame_key(claimed, frame),
            claimed.offset + (at + frame.first_block) * block_bytes,
            frame.num_blocks * block_bytes,
            block_ids[begin : begin + len(wanted)],
        )


def holds(check: Check, port: EnginePort) -> bool:
    """Whether the bytes copied are those that the sender read from its cache.

    Checked after the copy: staging that is right now was right while it was copied.
    """
    check.copy.wait()
    data = port.memory[check.offset : check.offset + check.num_bytes]
    return checksum(data) == check.frame.checksum


@dataclass(slots=True)
class _Arriving:
    """One early load in a rank.

    Attributes:
        epoch: of the frames counted; 0 before the first.
        num_seen: frames of that epoch.
        loaded: frames that were verified after their copies.
    """

    load: EarlyLoad
    epoch: int = 0
    num_seen: int = 0
    loaded: set[FrameKey] = field(default_factory=set)


class EarlyCopies:
    """A rank's half of early loads (early_loads.py): copies what has come, and knows what it has.

    Args:
        port: of this rank's thread.
        shard: of the cache, which this rank holds.
        layout: of the cache.
        copies: of this rank.
    """

    def __init__(self, port: EnginePort, shard: int, layout: KvLayout, copies: BlockCopies) -> None:
        self._port, self._shard, self._layout, self._copies = port, shard, layout, copies
        self._arriving: dict[bytes, _Arriving] = {}
        # Copies of the step under way that may not have ended.
        self._unchecked: list[tuple[_Arriving, Check]] = []

    def step(self, work: EarlyWork) -> None:
        """Begins the copies of what has come, as the step's metadata says."""
        for handoff_id in work.over:
            self._arriving.pop(handoff_id, None)
        for load in work.begun:
            self._arriving[load.handoff_id] = _Arriving(load)
        for handoff_id in work.arrived:
            if (arriving := self._arriving.get(handoff_id)) is not None:
                self._advance(arriving)

    def _advance(self, arriving: _Arriving) -> None:
        load = arriving.load
        seen = self._port.peek(load.handoff_id, self._shard, arriving.epoch, arriving.num_seen)
        if seen is None or seen.num_tokens != load.num_tokens:
            # It is over, or begins anew, or is another one than was meant.
            return
        if seen.epoch != arriving.epoch:
            arriving.epoch, arriving.num_seen = seen.epoch, 0
            arriving.loaded.clear()
        arriving.num_seen += len(seen.frames)
        for check in copy_in(self._copies, self._layout, seen, load.first_block, load.block_ids):
            if self._copies.finishes_at_once:
                # The bytes are still in the core's own cache.
                self._check(arriving, check)
            else:
                self._unchecked.append((arriving, check))
        self._copies.join()

    def _check(self, arriving: _Arriving, check: Check) -> None:
        if holds(check, self._port):
            arriving.loaded.add(check.frame)

    def take(self, load: Load) -> frozenset[FrameKey]:
        """What an ordinary load takes over, of any epoch: frames whose wanted blocks it has."""
        arriving = self._arriving.pop(load.handoff_id, None)
        if arriving is None or not load.is_early:
            return frozenset()
        begin = load.first_block - arriving.load.first_block
        filled = arriving.load.block_ids[begin : begin + len(load.block_ids)]
        if begin < 0 or filled != load.block_ids:
            return frozenset()
        return frozenset(arriving.loaded)

    def end_step(self) -> None:
        """The step's model has been launched: waits for what it began to copy, and verifies it."""
        for arriving, check in self._unchecked:
            self._check(arriving, check)
        self._unchecked.clear()
