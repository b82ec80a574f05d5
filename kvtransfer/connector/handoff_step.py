"""What one engine step does for handoffs: said by the scheduler's half, done by the ranks'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kvtransfer.connector.early_loads import EarlyWork
from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks to gather in this step, of every layer.

    Attributes:
        offset: where the handoff's bytes begin in the segment.
        first_block: index within the handoff of block_ids[0].
        num_blocks: how many blocks the whole handoff has.
        block_ids: in the engine's cache.
        last: whether the handoff is complete with them.
    """

    handoff_id: bytes
    offset: int
    first_block: int
    num_blocks: int
    block_ids: list[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks to copy from committed staging in this step, of every layer.

    Attributes:
        num_tokens: how many tokens the handoff must hold.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache.
        claims: what ranks may read, by shard, as Claim.parse takes it; empty: each asks itself.
        is_early: the blocks are those of its early load (early_loads.py), which ends with this one.
    """

    handoff_id: bytes
    num_tokens: int
    first_block: int
    block_ids: list[int]
    claims: Sequence[bytes] = ()
    is_early: bool = False


@dataclass(slots=True)
class HandoffStep:
    """What the scheduler's half asks of the ranks in one step.

    Attributes:
        pushes: blocks to gather.
        loads: blocks to fill.
        ended: handoffs that were not complete and get no more pushes.
        early: what is to be done for handoffs that are loaded while they arrive.
    """

    pushes: list[Push] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    early: EarlyWork = field(default_factory=EarlyWork)


@dataclass(slots=True)
class LoadReport:
    """What ranks say of a step's loads.

    Attributes:
        num_early_blocks: by handoff that was loaded early, how many blocks were there already in
            the rank that had the fewest.
        failed: handoffs that some rank could not load, and why.
    """

    num_early_blocks: dict[bytes, int] = field(default_factory=dict)
    failed: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.num_early_blocks or self.failed)

    def add(self, other: LoadReport) -> None:
        """Adds another rank's report of the same step."""
        for handoff_id, count in other.num_early_blocks.items():
            least = min(count, self.num_early_blocks.get(handoff_id, count))
            self.num_early_blocks[handoff_id] = least
        self.failed = other.failed | self.failed
