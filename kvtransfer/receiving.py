"""What a receiver knows of a handoff, and says of it; the machine is in service/receiver.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import DecodeError

from baton.kvtransfer.arena import Extent
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import Frame, Totals, verify
from baton.kvtransfer.local_wire import MAX_LISTED_FRAMES
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


# A load that begins so long after its commit says so, lest the commit expires under it. Most begin
# at once, and wake nobody.
LONG_HELD_S = 1.0
_S = ReceiveState
# To the same state, or back: a newer epoch.
TRANSITIONS: dict[ReceiveState, frozenset[ReceiveState]] = {
    _S.QUEUED: frozenset({_S.QUEUED, _S.RECEIVING, _S.RELEASED, _S.FAILED}),
    # To CLAIMED: committed, and claimed ahead.
    _S.RECEIVING: frozenset(
        {
            _S.QUEUED,
            _S.RECEIVING,
            _S.INTERRUPTED,
            _S.COMMITTED,
            _S.CLAIMED,
            _S.RELEASED,
            _S.FAILED,
        }
    ),
    _S.INTERRUPTED: frozenset({_S.QUEUED, _S.RECEIVING, _S.RELEASED, _S.FAILED}),
    _S.COMMITTED: frozenset({_S.QUEUED, _S.RECEIVING, _S.CLAIMED, _S.RELEASED, _S.FAILED}),
    _S.CLAIMED: frozenset({_S.CLAIMED, _S.RELEASED, _S.FAILED}),
    _S.RELEASED: frozenset(),
    _S.FAILED: frozenset(),
}
_NO_TOTALS = Totals()
SENDER_AT_WORK = frozenset({_S.QUEUED, _S.RECEIVING, _S.INTERRUPTED})


@dataclass(frozen=True, slots=True)
class Choice:
    """Which of the offered transports an epoch takes.

    Attributes:
        transport: its name.
        reason: why none of the better ones; empty when it is the best.
        link_id: of the link whose frames belong to the epoch; empty: its stream carries them.
    """

    transport: str
    reason: str = ""
    link_id: str = ""


@dataclass(frozen=True, slots=True)
class ReceiverLimits:
    """How long each state may last, and how much is remembered.

    Attributes:
        max_wait_s: for room, whatever a sender is willing to wait.
        idle_timeout_s: RECEIVING without a frame.
        commit_ttl_s: COMMITTED without a claim; CLAIMED ahead, if that is not too short for a load
            that begins within LONG_HELD_S.
        claim_timeout_s: CLAIMED, from each rank's claim; claimed ahead it lasts as COMMITTED does,
            and from when the scheduler says that its load begins, if that is longer.
        retry_timeout_s: INTERRUPTED, until the next epoch is opened.
        progress_bytes: subscribers are told again of a handoff after so many bytes of it, or half
            of what had not come when they were told last.
        max_queued: handoffs that wait for room.
        max_tombstones: ended handoffs that are remembered; likewise those claimed before they came.
        max_frames_ahead: of all ranks, of a handoff that can be claimed ahead: they are told in one
            message.
    """

    max_wait_s: float
    idle_timeout_s: float
    commit_ttl_s: float
    claim_timeout_s: float
    retry_timeout_s: float
    progress_bytes: int = 4 * 2**20
    max_queued: int = 1024
    max_tombstones: int = 4096
    max_frames_ahead: int = MAX_LISTED_FRAMES


@dataclass(frozen=True, slots=True)
class Reply:
    """Effect: write this to a stream. A refusal of what the stream carries also ends it."""

    stream: int
    kind: pb.PushReply.Kind.ValueType
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
    """What a claim gives one rank; offset is of this rank's bytes in the segment."""

    handoff_id: bytes
    epoch: int
    offset: int
    num_blocks: int
    num_tokens: int
    frames: tuple[ReceivedFrame, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect: tell subscribers of a handoff's new state.

    Attributes:
        grants: of every rank, when the handoff was claimed ahead and has been committed.
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
    num_bytes_received: int = 0
    grants: tuple[Grant, ...] = ()


Effect = Reply | Changed


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
class RankPart:
    """What arrived of one rank in the current epoch; `seen` has a byte per layer and block.

    Attributes:
        in_order: its frames as a claim lists them, once its rank has claimed it.
    """

    seen: bytearray
    num_seen: int = 0
    frames: list[ReceivedFrame] = field(default_factory=list)
    in_order: Sequence[ReceivedFrame] = ()
    totals: Totals = _NO_TOTALS
    committed: bool = False
    claimed: bool = False
    released: bool = False


@dataclass(slots=True)
class Handoff:
    """One live handoff. It owns its extent from RECEIVING on; `stream` is None once that ended."""

    handoff_id: bytes
    epoch: int
    stream: int | None
    num_blocks: int
    num_tokens: int
    num_bytes: int
    state: ReceiveState
    deadline: float
    ranks: list[RankPart]
    choice: Choice
    extent: Extent | None = None
    # Of this epoch; and how much of it when subscribers were last told of the progress.
    num_bytes_received: int = 0
    num_bytes_told: int = 0
    # Why the epoch was interrupted.
    problem: tuple[pb.RefusalReason.ValueType, str] | None = None


def changed(
    handoff: Handoff,
    reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
    detail: str = "",
) -> Changed:
    """The effect that tells of a handoff as it is."""
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
        handoff.num_bytes_received,
    )


def parse_open(frame: Frame) -> pb.PushOpen:
    """Raises MalformedFrame."""
    if not verify(frame):
        raise MalformedFrame("the open was altered", pb.REFUSAL_REASON_CHECKSUM)
    try:
        opened = pb.PushOpen.FromString(bytes(frame.payload))
    except DecodeError as error:
        raise MalformedFrame(f"the open's payload is no PushOpen: {error}") from None
    if opened.handoff_id != frame.handoff_id or opened.epoch != frame.epoch:
        raise MalformedFrame("the open's payload names another handoff than its header")
    if opened.num_blocks < 1:
        raise MalformedFrame("num_blocks is 0; must be at least 1")
    return opened
