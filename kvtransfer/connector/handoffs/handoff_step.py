"""The work of one engine step for handoffs: HandoffScheduler decides it, the ranks do it."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.v1 import kv_transfer_pb2


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring blocks of one of the engine's block tables.

    Attributes:
        first_block: Index within the handoff of block_ids[0], in blocks of the table.
        block_ids: Block ids in the engine's cache.
    """

    first_block: int
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Save:
    """Blocks of a handoff that ranks gather into staging in this step, in every layer.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        offset: Where the handoff's bytes begin in the segment.
        num_blocks: Size of the whole handoff (KvLayout.num_blocks).
        parts: The blocks of each block table; some may be empty.
        last: True if these blocks complete the handoff.
    """

    handoff_id: bytes
    offset: int
    num_blocks: int
    parts: tuple[Part, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks that ranks copy from committed staging, for every layer.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        num_tokens: Number of tokens that the handoff must hold.
        parts: The blocks of each block table; some may be empty.
        waiting_id: The engine's ID of the request that waits until the load has ended. Empty: the
            request runs in this step, whose model waits for the load.
        num_shards: Number of shards of the sender's cache; 0: as many as of this one.
        has_draft: Whether the handoff holds the layers of a draft.
        is_stream: Whether it is an interactive request that has its first token, and makes the next
            one after the load.
    """

    handoff_id: bytes
    num_tokens: int
    parts: tuple[Part, ...]
    waiting_id: str = ""
    num_shards: int = 0
    has_draft: bool = False
    is_stream: bool = False

    @property
    def block_ids(self) -> list[int]:
        """The blocks of all tables."""
        return [block_id for part in self.parts for block_id in part.block_ids]


@dataclass(slots=True)
class HandoffStep:
    """HandoffScheduler's orders to the ranks for one step.

    Attributes:
        saves: Blocks to copy into staging.
        loads: Blocks to copy from staging.
        ended: Handoffs that were incomplete and get no more saves.
        cleared: Block ids that ranks fill with zeros before they do anything else in this step.
    """

    saves: list[Save] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    ended: list[bytes] = field(default_factory=list)
    cleared: list[int] = field(default_factory=list)


@dataclass(slots=True)
class LoadReport:
    """The ranks' report on the loads that ended in a step.

    Attributes:
        failed: Handoffs that at least one rank could not load, with the reason.
    """

    failed: dict[bytes, kv_transfer_pb2.RefusalReason.ValueType] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.failed)

    def add(self, other: LoadReport) -> None:
        """Adds another rank's report on the same step."""
        self.failed = other.failed | self.failed
