"""The work of one engine step for handoffs: the scheduler's half decides it, the ranks do it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Push:
    """Blocks that ranks gather into staging in this step, for every layer.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        offset: Where the handoff's bytes begin in the segment.
        first_block: Index within the handoff of block_ids[0].
        num_blocks: Number of blocks in the whole handoff.
        block_ids: Block ids in the engine's cache.
        last: True if these blocks complete the handoff.
    """

    handoff_id: bytes
    offset: int
    first_block: int
    num_blocks: int
    block_ids: list[int]
    last: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that ranks copy from committed staging in this step, for every layer.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        num_tokens: Number of tokens that the handoff must hold.
        first_block: Index within the handoff of block_ids[0].
        block_ids: Block ids in the engine's cache.
    """

    handoff_id: bytes
    num_tokens: int
    first_block: int
    block_ids: list[int]


@dataclass(slots=True)
class HandoffStep:
    """The scheduler half's orders to the ranks for one step.

    Attributes:
        pushes: Blocks to gather.
        loads: Blocks to fill.
        ended: Handoffs that were incomplete and get no more pushes.
        cleared: Block ids that ranks fill with zeros before they do anything else in this step.
    """

    pushes: list[Push] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LoadReport:
    """The ranks' report on a step's loads.

    Attributes:
        failed: Handoffs that at least one rank could not load, with the reason.
    """

    failed: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.failed)

    def add(self, other: LoadReport) -> None:
        """Adds another rank's report on the same step."""
        self.failed = other.failed | self.failed
