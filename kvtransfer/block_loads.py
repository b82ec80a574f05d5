"""Copying what was received from staging into the engine's blocks, verified after the copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from baton.kvtransfer.block_copies import BlockCopies, Run
from baton.kvtransfer.control import Claim, EnginePort, checksum
from baton.kvtransfer.early_loads import EarlyLoad, EarlyReport, EarlyWork
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.notifier import Copy


@dataclass(frozen=True, slots=True)
class Check:
    """What must hold of a frame in staging once it has been copied.

    Attributes:
        offset: of the frame in the segment.
        block_ids: of the engine, that are wrong otherwise.
    """

    copy: Copy
    offset: int
    num_bytes: int
    checksum: int
    block_ids: Sequence[int]


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
    blocks = copies.prepare(block_ids)
    last, block_bytes = first_block + len(block_ids), layout.block_bytes
    for frame in claimed.frames:
        first = max(frame.first_block, first_block)
        end = min(frame.first_block + frame.num_blocks, last)
        if end <= first:
            continue
        at, begin = frame.layer * claimed.num_blocks, first - first_block
        run = Run(begin, end - first, claimed.offset + (at + first) * block_bytes)
        yield Check(
            copies.scatter(frame.layer, blocks, run),
            claimed.offset + (at + frame.first_block) * block_bytes,
            frame.num_blocks * block_bytes,
            frame.checksum,
            block_ids[begin : begin + end - first],
        )


def holds(check: Check, port: EnginePort) -> bool:
    """Whether the bytes copied are those that the sender read from its cache.

    Checked after the copy: staging that is right now was right while it was copied.
    """
    check.copy.wait()
    data = port.memory[check.offset : check.offset + check.num_bytes]
    return checksum(data) == check.checksum


@dataclass(slots=True)
class _Arriving:
    """One early load in a rank.

    Attributes:
        epoch: of the frames counted; 0 before the first.
        num_seen: frames of that epoch.
        num_missing: blocks of all layers that are not loaded and verified.
    """

    load: EarlyLoad
    num_missing: int
    epoch: int = 0
    num_seen: int = 0


class EarlyCopies:
    """A rank's half of early loads (early_loads.py): copies what has come, says when all has.

    Args:
        port: of this rank's thread.
        rank: tensor-parallel.
        layout: of the cache.
        copies: of this rank.
    """

    def __init__(self, port: EnginePort, rank: int, layout: KvLayout, copies: BlockCopies) -> None:
        self._port, self._rank, self._layout, self._copies = port, rank, layout, copies
        self._arriving: dict[bytes, _Arriving] = {}
        # Copies of the step under way that may not have ended.
        self._unchecked: list[tuple[_Arriving, Check]] = []
        self._report = EarlyReport()

    def step(self, work: EarlyWork) -> None:
        """Begins what the step's metadata asks for."""
        for handoff_id in work.over:
            self._arriving.pop(handoff_id, None)
        for load in work.begun:
            num_blocks = self._layout.num_layers * len(load.block_ids)
            self._arriving[load.handoff_id] = _Arriving(load, num_blocks)
        for handoff_id in work.arrived:
            if (arriving := self._arriving.get(handoff_id)) is not None:
                self._advance(arriving)

    def _advance(self, arriving: _Arriving) -> None:
        load = arriving.load
        seen = self._port.peek(load.handoff_id, self._rank, arriving.epoch, arriving.num_seen)
        if seen is None or seen.num_tokens != load.num_tokens:
            # It is over, or begins anew, or is another one than was meant: the load comes whole.
            self._report.spoiled.add(load.handoff_id)
            self._arriving.pop(load.handoff_id, None)
            return
        if seen.epoch != arriving.epoch:
            # What was loaded of another epoch may not be what this one sends.
            arriving.epoch, arriving.num_seen = seen.epoch, 0
            arriving.num_missing = self._layout.num_layers * len(load.block_ids)
        arriving.num_seen += len(seen.frames)
        for check in copy_in(self._copies, self._layout, seen, load.first_block, load.block_ids):
            if self._copies.finishes_at_once:
                # The bytes are still in the core's own cache.
                self._check(arriving, check)
            else:
                self._unchecked.append((arriving, check))
        self._copies.join()

    def _check(self, arriving: _Arriving, check: Check) -> None:
        load = arriving.load
        if not holds(check, self._port):
            self._report.spoiled.add(load.handoff_id)
            self._arriving.pop(load.handoff_id, None)
            return
        arriving.num_missing -= len(check.block_ids)
        if not arriving.num_missing and load.handoff_id in self._arriving:
            self._report.loaded[load.handoff_id, arriving.epoch] += 1

    def take_report(self) -> EarlyReport:
        """What the step under way, whose model has been launched, and those before it have done."""
        for arriving, check in self._unchecked:
            self._check(arriving, check)
        self._unchecked.clear()
        report, self._report = self._report, EarlyReport()
        return report
