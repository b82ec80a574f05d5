"""The receiver's data of a handoff: states, limits, effects. receiver.py is the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from baton.kvtransfer.arena import Extent
from baton.kvtransfer.frames import Totals
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transports.negotiation import Choice
from baton.kvtransfer.transports.transport import Pull
from baton.v1 import kv_transfer_pb2 as pb


class ReceiveState(Enum):
    """States of a handoff at its receiver; the values are the contract's."""

    QUEUED = pb.HANDOFF_STATE_QUEUED
    RECEIVING = pb.HANDOFF_STATE_RECEIVING
    COMMITTED = pb.HANDOFF_STATE_COMMITTED
    CLAIMED = pb.HANDOFF_STATE_CLAIMED
    RELEASED = pb.HANDOFF_STATE_RELEASED
    FAILED = pb.HANDOFF_STATE_FAILED
    INTERRUPTED = pb.HANDOFF_STATE_INTERRUPTED


_S = ReceiveState
# A newer epoch moves a handoff to the same state or back.
TRANSITIONS: dict[ReceiveState, frozenset[ReceiveState]] = {
    _S.QUEUED: frozenset({_S.QUEUED, _S.RECEIVING, _S.RELEASED, _S.FAILED}),
    _S.RECEIVING: frozenset(
        {_S.QUEUED, _S.RECEIVING, _S.INTERRUPTED, _S.COMMITTED, _S.RELEASED, _S.FAILED}
    ),
    _S.INTERRUPTED: frozenset({_S.QUEUED, _S.RECEIVING, _S.RELEASED, _S.FAILED}),
    _S.COMMITTED: frozenset({_S.QUEUED, _S.RECEIVING, _S.CLAIMED, _S.RELEASED, _S.FAILED}),
    _S.CLAIMED: frozenset({_S.RELEASED, _S.FAILED}),
    _S.RELEASED: frozenset(),
    _S.FAILED: frozenset(),
}
_NO_TOTALS = Totals()
SENDER_AT_WORK = frozenset({_S.QUEUED, _S.RECEIVING, _S.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """How long each state may last, and how much is remembered.

    Attributes:
        max_wait_s: Longest wait for staging, whatever the sender allows.
        idle_timeout_s: Longest RECEIVING without a frame or the end of a pull.
        commit_ttl_s: Longest COMMITTED without a claim.
        claim_timeout_s: Longest CLAIMED, from each claim of a shard.
        retry_timeout_s: Longest INTERRUPTED, until the next epoch is opened.
        max_queued: Most handoffs that wait for staging.
        max_tombstones: Most ended handoffs that are remembered.
    """

    max_wait_s: float
    idle_timeout_s: float
    commit_ttl_s: float
    claim_timeout_s: float
    retry_timeout_s: float
    max_queued: int = 1024
    max_tombstones: int = 4096


@dataclass(frozen=True, slots=True)
class Reply:
    """Effect: write a reply to a stream. A refusal of the stream's handoff also ends the stream."""

    stream: int
    kind: pb.HandoffReply.Kind.ValueType
    handoff_id: bytes
    epoch: int
    reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED
    detail: str = ""
    transport: str = ""
    transport_reason: str = ""


@dataclass(frozen=True, slots=True)
class ReceivedFrame:
    """Place and checksum of a frame in staging."""

    layer: int
    first_block: int
    num_blocks: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Grant:
    """One shard of a handoff, which a rank may read; offset is where it begins in the segment."""

    handoff_id: bytes
    offset: int
    num_blocks: int
    num_tokens: int
    frames: tuple[ReceivedFrame, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect: tell subscribers a handoff's new state.

    Attributes:
        stream: Number of the stream that carried the latest open; None before the first open.
    """

    handoff_id: bytes
    epoch: int
    state: ReceiveState
    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED
    detail: str = ""
    transport: str = ""
    num_shards: int = 0
    has_draft: bool = False
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class Stuck:
    """Effect: end the service, because too much staging waits for pulls that do not end."""

    detail: str


Effect = Reply | Changed | Pull | Stuck


@dataclass(slots=True)
class ReceiverStatistics:
    """Counts since the start; bytes and frames by transport."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    num_frames: Counter[str] = field(default_factory=Counter)
    num_committed: int = 0
    num_failed: int = 0
    num_expired: int = 0
    refusals: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class ShardProgress:
    """The frames of one of the sender's shards that arrived in the current epoch.

    Attributes:
        seen: One byte for each block of the shard (KvLayout.index); 1 when it has arrived or is
            being pulled. Empty until the handoff has staging, because the sender chooses the
            number of blocks, and only staging limits how many handoffs have that many.
        num_seen: Number of blocks that have arrived.
        num_pulls: Number of pulls of the epoch that have not ended.
        promised: Totals of the shard's commit, once that has come. It counts when no pull is
            outstanding.
        in_order: The frames in the order of a claim, once a rank has claimed the shard.
    """

    seen: bytearray = field(default_factory=bytearray)
    num_seen: int = 0
    num_pulls: int = 0
    frames: list[ReceivedFrame] = field(default_factory=list)
    in_order: Sequence[ReceivedFrame] = ()
    totals: Totals = _NO_TOTALS
    promised: Totals | None = None
    committed: bool = False
    claimed: bool = False
    released: bool = False


@dataclass(slots=True)
class Handoff:
    """One live handoff. It owns its extent from RECEIVING on, until it gives the extent up.

    An extent that is given up while pulls may write to it belongs to those pulls (pulls.py).

    Attributes:
        stream: Number of the stream that carries it; None once that has ended.
        last_stream: The same, also after the stream has ended.
        shards: What has arrived of each of the sender's shards.
        layout: Layout of the handoff: of this cache, with the sender's draft and number of shards.
        problem: Why the epoch was interrupted.
    """

    handoff_id: bytes
    epoch: int
    stream: int | None
    num_blocks: int
    num_tokens: int
    num_bytes: int
    state: ReceiveState
    deadline: float
    shards: list[ShardProgress]
    choice: Choice
    layout: KvLayout
    extent: Extent | None = None
    problem: tuple[pb.RefusalReason.ValueType, str] | None = None
    last_stream: int | None = None


def changed(
    handoff: Handoff,
    reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
    detail: str = "",
) -> Changed:
    """Returns the effect that tells subscribers the current state of a handoff."""
    return Changed(
        handoff.handoff_id,
        handoff.epoch,
        handoff.state,
        handoff.num_blocks,
        handoff.num_tokens,
        handoff.num_bytes,
        reason,
        detail,
        handoff.choice.transport,
        handoff.layout.num_shards,
        bool(handoff.layout.draft_groups),
        handoff.last_stream,
    )
