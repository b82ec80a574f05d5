"""What one engine step does for handoffs: said by the scheduler's half, done by the ranks'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.kvtransfer.early_loads import EarlyWork


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks to gather in this step, of every layer.

    Attributes:
        offset: of the handoff's bytes in the segment.
        first_block: index within the handoff of block_ids[0].
        num_blocks: of the whole handoff.
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
        num_tokens: that the handoff must hold.
        first_block: index within the handoff of block_ids[0].
        block_ids: in the engine's cache.
        claims: what each rank may read, by rank, as Claim.parse takes it; empty: each asks itself.
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
        ended: handoffs that were not complete and get no more pushes.
    """

    pushes: list[Push] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    early: EarlyWork = field(default_factory=EarlyWork)
