"""The sender's data of a handoff: states, limits, effects. sender.py is the machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from baton.kvtransfer.arena import Extent
from baton.kvtransfer.frames import Totals
from baton.kvtransfer.transports.outgoing import OutgoingBlocks, OutgoingFrame
from baton.v1 import kv_transfer_pb2 as pb


class SendState(Enum):
    """States of a handoff at its sender."""

    # Waits for room in the sender's own staging.
    WAITING = "waiting"
    # Waits until the receiver has reserved the whole size.
    OPENING = "opening"
    SENDING = "sending"
    # All frames are with the transport; the receiver verifies them.
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"
    ABORTED = "aborted"


_S = SendState
TRANSITIONS: dict[SendState, frozenset[SendState]] = {
    _S.WAITING: frozenset({_S.OPENING, _S.FAILED, _S.ABORTED}),
    _S.OPENING: frozenset({_S.OPENING, _S.SENDING, _S.FAILED, _S.ABORTED}),
    _S.SENDING: frozenset({_S.OPENING, _S.COMMITTING, _S.FAILED, _S.ABORTED}),
    _S.COMMITTING: frozenset({_S.OPENING, _S.COMMITTED, _S.FAILED, _S.ABORTED}),
    _S.COMMITTED: frozenset(),
    _S.FAILED: frozenset(),
    _S.ABORTED: frozenset(),
}
OVER = frozenset({_S.COMMITTED, _S.FAILED, _S.ABORTED})


@dataclass(frozen=True, slots=True)
class SenderLimits:
    """How long each state may last.

    Attributes:
        max_wait_s: Longest wait for staging, whatever the caller allows.
        idle_timeout_s: Longest SENDING without a fill or a send, and COMMITTING without a reply.
        reply_grace_s: Time for the network, added to the wait of OPENING.
        linger_s: Time for which the extent of an aborted send stays reserved: the engine may still
            be writing to it. A rank writes in the order of its steps, so a write that comes even
            later is over before the rank writes the next handoff there.
        stages_linger_s: Like linger_s, for an engine with several pipeline stages. A later stage
            may still write for steps that the first stage has finished, while the first stage
            already writes the next handoff. Longer than these steps take.
        writer_timeout_s: Longest time for which the extent of a failed send stays reserved. The
            engine is not told of the failure, so the extent is freed by an abort or by the last
            frame of every rank that sends. Longer than any request.
        max_sends: Most sends at a time.
    """

    max_wait_s: float
    idle_timeout_s: float
    reply_grace_s: float = 5.0
    linger_s: float = 0.5
    stages_linger_s: float = 10.0
    writer_timeout_s: float = 3600.0
    max_sends: int = 1024


@dataclass(frozen=True, slots=True)
class Reserved:
    """Effect: reply to the caller of `open` with the offset of its staging."""

    handoff_id: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class NotReserved:
    """Effect: reply to the caller of `open` that it gets no staging."""

    handoff_id: bytes
    reason: pb.RefusalReason.ValueType
    detail: str


@dataclass(frozen=True, slots=True)
class StartStream:
    """Effect: dial the target; then take batches with `next_batch`."""

    handoff_id: bytes
    target: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Effect: `next_batch` may have frames now."""

    handoff_id: bytes


@dataclass(frozen=True, slots=True)
class StopStream:
    """Effect: end the stream, after writing `farewell` when there is one."""

    handoff_id: bytes
    farewell: bytes | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """Effect: tell the main process how a send ended."""

    handoff_id: bytes
    epoch: int
    committed: bool
    reason: pb.RefusalReason.ValueType
    detail: str
    num_bytes: int
    num_frames: int
    transport: str
    num_fallbacks: int
    reserve_s: float
    open_s: float
    fill_s: float
    exposed_s: float


Effect = Reserved | NotReserved | StartStream | Wake | StopStream | Ended


class SenderTransports(Protocol):
    """The transports, as the sender uses them; transports/negotiation.py implements this."""

    def offers(self, target: str, tried: Container[str]) -> list[pb.TransportOffer]:
        """Returns the offers for an epoch to a target, best first, without those tried."""
        ...

    def frame(self, transport: str, blocks: OutgoingBlocks) -> OutgoingFrame:
        """Returns the frame by which a transport carries a run of blocks."""
        ...


@dataclass(slots=True)
class SenderStatistics:
    """Counts since the start; bytes, frames, commits and fallbacks are by transport."""

    num_bytes: Counter[str] = field(default_factory=Counter)
    num_frames: Counter[str] = field(default_factory=Counter)
    num_committed: Counter[str] = field(default_factory=Counter)
    num_fallbacks: Counter[str] = field(default_factory=Counter)
    num_failed: int = 0
    num_expired: int = 0
    refusals: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class FilledRun:
    """A run of blocks that waits to be sent; with num_blocks 0, the end of a shard."""

    shard: int
    layer: int = 0
    first_block: int = 0
    num_blocks: int = 0
    checksum: int = 0


@dataclass(slots=True)
class Send:
    """One send. It owns its extent from OPENING until the extent is freed.

    Attributes:
        epoch: Number of opens so far, from 1; every frame carries it.
        wait_until: Deadline for the receiver to find room.
        filled: The runs that the engine has written, in order; `num_sent` of them have left.
        writers: Ranks that may still write to the extent, each as its shard and its stage.
        tried: Transports that failed.
        offers: Offers of the open under way.
    """

    handoff_id: bytes
    target: str
    num_blocks: int
    num_tokens: int
    num_bytes: int
    epoch: int
    state: SendState
    deadline: float
    wait_until: float
    totals: list[Totals]
    writers: set[tuple[int, int]]
    opened_at: float
    reserved_at: float = 0.0
    receiver_opened_at: float = 0.0
    last_filled_at: float = 0.0
    open_due: bool = False
    num_commits: int = 0
    filled: list[FilledRun] = field(default_factory=list)
    num_sent: int = 0
    num_frames: int = 0
    num_fallbacks: int = 0
    tried: set[str] = field(default_factory=set)
    offers: list[pb.TransportOffer] = field(default_factory=list)
    transport: str = ""
    extent: Extent | None = None


def ended(
    send: Send,
    state: SendState,
    reason: pb.RefusalReason.ValueType,
    detail: str,
    now: float,
) -> Ended:
    """Returns the effect that reports how a send ended."""
    committed = state is _S.COMMITTED
    return Ended(
        send.handoff_id,
        send.epoch,
        committed,
        reason,
        detail,
        send.num_bytes,
        num_frames=send.num_frames,
        transport=send.transport,
        num_fallbacks=send.num_fallbacks,
        reserve_s=send.reserved_at - send.opened_at,
        open_s=max(0.0, send.receiver_opened_at - send.reserved_at),
        fill_s=max(0.0, send.last_filled_at - send.reserved_at),
        exposed_s=now - send.last_filled_at if committed else 0.0,
    )
