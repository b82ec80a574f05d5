"""The receiving state machine: what may land in staging, and what may be loaded from it.

Frames, claims and releases come here; who has room, and how each ends, is in handoff_table.py.

Pure and synchronous: time is a parameter, and everything to be told to somebody is returned. The
network never touches anything but the extent that belongs to one (handoff, epoch), and only a
handoff of which every block of every rank arrived exactly once, verified, can be claimed.

An epoch whose transport fails, or alters bytes, is interrupted: the handoff keeps its room for some
time, and its sender may send everything again as the next epoch, on another transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from baton.kvtransfer.arena import Arena, ArenaStatistics
from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.frames import Frame, FrameKind, Totals, copy, position_digest, verify
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.receiving import (
    LONG_HELD_S,
    SENDER_AT_WORK,
    Changed,
    Choice,
    Effect,
    Grant,
    Handoff,
    RankPart,
    ReceivedFrame,
    ReceiverLimits,
    ReceiverStatistics,
    ReceiveState,
    changed,
    parse_open,
)
from baton.kvtransfer.service.handoff_table import HandoffTable
from baton.runtime import kv_fingerprint
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState


class Receiver:
    """Every handoff on its way to this worker.

    Streams are numbers that the caller gives out, never twice; one stream carries one handoff.

    Args:
        arena: of the receiving half of the segment; nobody else uses it.
        memory: the whole segment, indexed by the arena's offsets.
        choose: takes one of an open's offers for what the stream will carry; MalformedFrame says
            that it can take none.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        limits: ReceiverLimits,
        choose: Callable[[int, pb.PushOpen], Choice],
    ) -> None:
        self._table = HandoffTable(arena, limits)
        self._memory, self._limits, self._choose = memory, limits, choose
        self._layout: KvLayout | None = None

    def configure(self, layout: KvLayout) -> None:
        """Sets what handoffs must look like; called once, before anything else."""
        self._layout = layout

    def handle_frame(self, stream: int, frame: Frame, now: float) -> list[Effect]:
        """Applies one frame that a stream carried."""
        if frame.kind is FrameKind.OPEN:
            self._open(stream, frame, now)
        elif (handoff := self._addressed(stream, frame)) is not None:
            self._take(handoff, frame, now)
        return self._table.take_effects()

    def handle_link_frame(self, link_id: str, frame: Frame, now: float) -> list[Effect]:
        """Applies one frame that a link carried, of any handoff that chose the link."""
        live = self._table.live.get(frame.handoff_id)
        if live is None or live.epoch != frame.epoch or live.choice.link_id != link_id:
            # Nobody to tell: the sender hears of a handoff's end on its stream.
            self._table.statistics.refusals[pb.REFUSAL_REASON_UNKNOWN_HANDOFF] += 1
        elif frame.kind in (FrameKind.DATA, FrameKind.COMMIT):
            self._take(live, frame, now)
        else:
            detail = f"a link carries data and commits, not {frame.kind.name}"
            self._table.fail(live, pb.REFUSAL_REASON_MALFORMED, detail, now)
        return self._table.take_effects()

    def handle_link_lost(self, link_id: str, detail: str, now: float) -> list[Effect]:
        """A link ended, whyever: it interrupts the epochs that it carried."""
        for handoff in list(self._table.live.values()):
            if handoff.choice.link_id == link_id and handoff.state is _S.RECEIVING:
                self._table.interrupt(handoff, pb.REFUSAL_REASON_TRANSPORT, detail, now)
        return self._table.take_effects()

    def handle_malformed(self, stream: int, error: MalformedFrame, now: float) -> list[Effect]:
        """A stream carried something that is no frame: nothing it says can be trusted.

        One whose header's checksum is wrong was a frame, and was altered like any other.
        """
        handoff = self._table.of_stream(stream)
        altered = error.reason == pb.REFUSAL_REASON_CHECKSUM
        if handoff is not None and altered and handoff.state is _S.RECEIVING:
            self._table.interrupt(handoff, error.reason, str(error), now)
        elif handoff is not None and handoff.state in SENDER_AT_WORK:
            self._table.fail(handoff, error.reason, str(error), now)
        else:
            self._table.refuse(stream, b"", 0, error.reason, str(error))
        return self._table.take_effects()

    def handle_stream_lost(self, stream: int, now: float) -> list[Effect]:
        """A stream ended, whyever; before the commit that is the end of its handoff."""
        handoff = self._table.lose(stream)
        if handoff is not None and handoff.state in SENDER_AT_WORK:
            detail = "the sender's stream ended before the commit"
            incomplete = (pb.REFUSAL_REASON_INCOMPLETE, detail)
            self._table.fail(handoff, *(handoff.problem or incomplete), now)
        return self._table.take_effects()

    def serves(self, stream: int) -> bool:
        """Whether a stream carries a handoff that still wants its frames."""
        handoff = self._table.of_stream(stream)
        return handoff is not None and handoff.state in SENDER_AT_WORK

    def claim(self, handoff_id: bytes, rank: int, now: float) -> tuple[Grant, list[Effect]]:
        """Lets one rank read its part of a committed handoff until it releases it.

        Raises:
            TransferRefused: not committed (any more), no such rank, or released by it.
        """
        handoff = self._table.live.get(handoff_id)
        if handoff is None or handoff.extent is None:
            raise TransferRefused(
                f"handoff {handoff_id.hex()} is {self._table.state_in_words(handoff_id)}"
            )
        if handoff.state not in (_S.COMMITTED, _S.CLAIMED):
            raise TransferRefused(f"handoff {handoff_id.hex()} is {handoff.state.name}")
        if not 0 <= rank < len(handoff.ranks) or handoff.ranks[rank].released:
            raise TransferRefused(f"handoff {handoff_id.hex()} has nothing for rank {rank}")
        part = handoff.ranks[rank]
        if not part.claimed:
            part.claimed, part.in_order = True, _in_order(part.frames)
            handoff.deadline = now + self._limits.claim_timeout_s
        if handoff.state is _S.COMMITTED:
            self._table.advance(handoff, _S.CLAIMED)
        return self._grant(handoff, rank, part.in_order), self._table.take_effects()

    def claim_ahead(self, handoff_id: bytes, now: float) -> list[Effect]:
        """Lets every rank read its part as soon as the handoff is committed, also before its open.

        From the commit on it is claimed, for as long as a commit lasts: nobody but its reader takes
        the staging away. Asked again once it is claimed, when its load begins, it lasts for a load
        from then on. One that has ended stays as it is, and so does one of too many frames.
        """
        handoff = self._table.live.get(handoff_id)
        if handoff is not None and handoff.state is _S.COMMITTED:
            if self._can_grant_all(handoff):
                self._grant_all(handoff, now)
        elif handoff is not None and handoff.state is _S.CLAIMED:
            handoff.deadline = max(handoff.deadline, now + self._limits.claim_timeout_s)
        else:
            self._table.claim_when_committed(handoff_id)
        return self._table.take_effects()

    def peek(self, handoff_id: bytes, rank: int, epoch: int, num_seen: int) -> Grant:
        """What has arrived of one rank's part, as frames in the order in which they came.

        It gives no right to the staging: see LocalPeek in the contract.

        Args:
            handoff_id: of 16 bytes.
            rank: whose part.
            epoch: of the frames that were seen; those of another one are all new.
            num_seen: leading frames to leave out.

        Raises:
            TransferRefused: it has no staging, or is over, or no such rank.
        """
        handoff = self._table.live.get(handoff_id)
        readable = (_S.RECEIVING, _S.COMMITTED, _S.CLAIMED)
        if handoff is None or handoff.extent is None or handoff.state not in readable:
            words = handoff.state.name if handoff else self._table.state_in_words(handoff_id)
            raise TransferRefused(f"handoff {handoff_id.hex()} is {words}")
        if not 0 <= rank < len(handoff.ranks):
            raise TransferRefused(f"handoff {handoff_id.hex()} has nothing for rank {rank}")
        begin = num_seen if epoch == handoff.epoch else 0
        return self._grant(handoff, rank, handoff.ranks[rank].frames[begin:])

    def release(
        self,
        handoff_id: bytes,
        rank: int,
        now: float,
        *,
        all_ranks: bool = False,
        not_loaded: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
    ) -> list[Effect]:
        """One rank, or all, has loaded its part or has nothing to load. Idempotent.

        Args:
            handoff_id: of 16 bytes.
            rank: unless it is all of them.
            now: by time.monotonic.
            all_ranks: every rank's part.
            not_loaded: why nothing was loaded that should have been: it fails for that.
        """
        handoff = self._table.live.get(handoff_id)
        if not_loaded:
            expired = not_loaded == pb.REFUSAL_REASON_EXPIRED
            self._table.statistics.num_expired += expired and handoff is not None
            self._table.give_up(handoff_id, not_loaded, _why_not_loaded(not_loaded, handoff), now)
            return self._table.take_effects()
        if handoff is None:
            if all_ranks and self._table.why_ended(handoff_id) is None:
                self._table.bury(
                    Changed(handoff_id, 0, _S.RELEASED, detail="released before its open")
                )
            return self._table.take_effects()
        if 0 <= rank < len(handoff.ranks):
            handoff.ranks[rank].released = True
        if all_ranks or all(part.released for part in handoff.ranks):
            self._table.end(handoff, _S.RELEASED, pb.REFUSAL_REASON_CANCELLED, "released", now)
        return self._table.take_effects()

    def drop(self, handoff_id: bytes, now: float) -> list[Effect]:
        """Gives up a handoff that nobody wants; an open that comes later is refused.

        A claimed one ends with its release or the claim's time: somebody is reading it.
        """
        handoff = self._table.live.get(handoff_id)
        if handoff is None or handoff.state is not _S.CLAIMED:
            detail = "dropped by the receiving worker"
            self._table.give_up(handoff_id, pb.REFUSAL_REASON_CANCELLED, detail, now)
        return self._table.take_effects()

    def expire(self, now: float) -> list[Effect]:
        """Ends every handoff whose state has lasted too long."""
        self._table.expire(now)
        return self._table.take_effects()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return self._table.next_deadline()

    def known(self) -> Iterator[Changed]:
        """The state of every handoff that is live or remembered."""
        return self._table.known()

    def arena_statistics(self) -> ArenaStatistics:
        """Usage of this side's staging."""
        return self._table.arena_statistics()

    @property
    def statistics(self) -> ReceiverStatistics:
        return self._table.statistics

    @property
    def num_live(self) -> int:
        return self._table.num_live

    @property
    def num_waiting(self) -> int:
        """Handoffs that wait for room."""
        return self._table.num_waiting

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the live handoffs hold what they should."""
        self._table.check_integrity()

    def _grant(self, handoff: Handoff, rank: int, frames: Sequence[ReceivedFrame]) -> Grant:
        assert handoff.extent is not None
        begin = self._known_layout().offset(rank, 0, 0, handoff.num_blocks)
        return Grant(
            handoff.handoff_id,
            handoff.epoch,
            handoff.extent.offset + begin,
            handoff.num_blocks,
            handoff.num_tokens,
            tuple(frames),
        )

    def _open(self, stream: int, frame: Frame, now: float) -> None:
        layout = self._known_layout()
        handoff_id, epoch = frame.handoff_id, frame.epoch
        carried = self._table.streams.get(stream, handoff_id)
        if carried != handoff_id:
            detail = f"the stream carries handoff {carried.hex()}; one stream carries one handoff"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_MALFORMED, detail)
            return
        if (why := self._table.why_ended(handoff_id)) is not None:
            self._table.refuse(stream, handoff_id, epoch, *why)
            return
        live = self._table.live.get(handoff_id)
        if live is not None:
            if live.state is _S.CLAIMED:
                detail = "it is being loaded"
                self._table.refuse(
                    stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail
                )
                return
            if epoch <= live.epoch:
                detail = f"epoch is {epoch}; epoch {live.epoch} is open"
                if live.stream == stream and epoch == live.epoch and live.state in SENDER_AT_WORK:
                    self._table.fail(live, pb.REFUSAL_REASON_MALFORMED, detail, now)
                else:
                    self._table.refuse(
                        stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail
                    )
                return
        try:
            opened = parse_open(frame)
        except MalformedFrame as error:
            self._table.reject(stream, frame, live, error.reason, str(error), now)
            return
        num_bytes = layout.handoff_bytes(opened.num_blocks)
        if differing := kv_fingerprint.differences(layout.fingerprint(), opened.fingerprint):
            detail = f"KV caches differ: {'; '.join(differing)}"
            self._table.reject(stream, frame, live, pb.REFUSAL_REASON_FINGERPRINT, detail, now)
        elif not 1 <= opened.num_tokens <= opened.num_blocks * layout.block_size_tokens:
            detail = (
                f"num_tokens is {opened.num_tokens}; must be 1 to "
                f"{opened.num_blocks * layout.block_size_tokens} for {opened.num_blocks} blocks"
            )
            self._table.reject(stream, frame, live, pb.REFUSAL_REASON_MALFORMED, detail, now)
        elif (why := self._table.why_no_room(num_bytes, live)) is not None:
            self._table.reject(stream, frame, live, *why, now)
        else:
            try:
                choice = self._choose(stream, opened)
            except MalformedFrame as error:
                self._table.reject(stream, frame, live, error.reason, str(error), now)
                return
            self._begin(stream, opened, choice, num_bytes, live, now)

    def _begin(
        self,
        stream: int,
        opened: pb.PushOpen,
        choice: Choice,
        num_bytes: int,
        live: Handoff | None,
        now: float,
    ) -> None:
        """Starts an epoch of a handoff: a new one, or one that voids what came before it."""
        layout = self._known_layout()
        ranks = [
            RankPart(bytearray(layout.num_layers * opened.num_blocks))
            for _ in range(layout.num_shards)
        ]
        if live is None:
            live = Handoff(opened.handoff_id, 0, None, 0, 0, 0, _S.QUEUED, now, ranks, choice)
            self._table.add(live)
        elif live.stream not in (None, stream) and live.state in SENDER_AT_WORK:
            detail = f"superseded by epoch {opened.epoch}"
            self._table.refuse(
                live.stream, live.handoff_id, live.epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail
            )
        self._table.carry(live, stream)
        live.epoch, live.ranks = opened.epoch, ranks
        live.choice, live.problem = choice, None
        live.num_bytes_received = live.num_bytes_told = 0
        live.num_blocks, live.num_tokens = opened.num_blocks, opened.num_tokens
        self._table.reserve(live, num_bytes, opened.wait_ms / 1000, now)

    def _take(self, handoff: Handoff, frame: Frame, now: float) -> None:
        """A frame of a handoff's current epoch."""
        if frame.kind is FrameKind.ABORT:
            if handoff.state is not _S.CLAIMED:
                given_up = (pb.REFUSAL_REASON_CANCELLED, "the sender gave it up")
                self._table.fail(handoff, *(handoff.problem or given_up), now)
        elif handoff.state is _S.INTERRUPTED:
            # On its way when the sender was told.
            self._table.statistics.refusals[pb.REFUSAL_REASON_OLD_EPOCH] += 1
        elif frame.kind is FrameKind.DATA:
            self._data(handoff, frame, now)
        elif frame.kind is FrameKind.COMMIT:
            self._commit(handoff, frame, now)
        else:
            raise AssertionError(f"{frame.kind.name} is resolved before it comes here")

    def _addressed(self, stream: int, frame: Frame) -> Handoff | None:
        """The live handoff that a frame may act on; otherwise the frame is refused.

        A frame for somebody else's handoff, or for an older epoch, must not harm what it names.
        """
        handoff_id, epoch = frame.handoff_id, frame.epoch
        live = self._table.live.get(handoff_id)
        if live is None:
            if (why := self._table.why_ended(handoff_id)) is not None:
                self._table.refuse(stream, handoff_id, epoch, *why)
            else:
                detail = "this handoff was never opened here"
                self._table.refuse(
                    stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail
                )
        elif epoch < live.epoch:
            detail = f"epoch is {epoch}; epoch {live.epoch} is open"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail)
        elif live.stream != stream or epoch != live.epoch:
            detail = f"epoch {epoch} of this handoff was not opened on this stream"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail)
        else:
            return live
        return None

    def _data(self, handoff: Handoff, frame: Frame, now: float) -> None:
        layout = self._known_layout()
        if handoff.state in (_S.COMMITTED, _S.CLAIMED):
            detail = "a data frame after the commit"
            self._table.refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        if (problem := self._problem(handoff, frame)) is not None:
            self._table.fail(handoff, pb.REFUSAL_REASON_MALFORMED, problem, now)
            return
        assert handoff.extent is not None
        part = handoff.ranks[frame.rank]
        start = handoff.extent.offset + layout.offset(
            frame.rank, frame.layer, frame.first_block, handoff.num_blocks
        )
        # Checked after the copy: a payload in the sender's segment may change under it.
        target = self._memory[start : start + len(frame.payload)]
        if copy(target, frame.payload) != frame.checksum:
            detail = f"layer {frame.layer}, block {frame.first_block}: the bytes were altered"
            self._table.interrupt(handoff, pb.REFUSAL_REASON_CHECKSUM, detail, now)
            return
        first = frame.layer * handoff.num_blocks + frame.first_block
        part.seen[first : first + frame.num_blocks] = b"\x01" * frame.num_blocks
        part.num_seen += frame.num_blocks
        part.frames.append(
            ReceivedFrame(frame.layer, frame.first_block, frame.num_blocks, frame.checksum)
        )
        digest = position_digest(
            frame.rank, frame.layer, frame.first_block, frame.num_blocks, frame.checksum
        )
        part.totals = part.totals.plus(len(frame.payload), digest)
        handoff.deadline = now + self._limits.idle_timeout_s
        self._table.statistics.num_bytes[handoff.choice.transport] += len(frame.payload)
        self._table.statistics.num_frames[handoff.choice.transport] += 1
        handoff.num_bytes_received += len(frame.payload)
        untold = handoff.num_bytes_received - handoff.num_bytes_told
        # By halves of what is left, in the end: what is not loaded early the request waits for.
        left = handoff.num_bytes - handoff.num_bytes_received
        if untold >= self._limits.progress_bytes or 0 < left <= untold:
            handoff.num_bytes_told = handoff.num_bytes_received
            self._table.tell(changed(handoff))

    def _problem(self, handoff: Handoff, frame: Frame) -> str | None:
        """What is wrong with a data frame's place or size, in words."""
        layout = self._known_layout()
        if handoff.state is not _S.RECEIVING:
            return "a data frame before the handoff was opened"
        if frame.rank >= layout.num_shards:
            return f"rank is {frame.rank}; must be below {layout.num_shards}"
        if frame.layer >= layout.num_layers:
            return f"layer is {frame.layer}; must be below {layout.num_layers}"
        end = frame.first_block + frame.num_blocks
        if frame.num_blocks < 1 or end > handoff.num_blocks:
            return f"blocks {frame.first_block} to {end}; the handoff has {handoff.num_blocks}"
        if len(frame.payload) != frame.num_blocks * layout.block_bytes:
            return (
                f"{len(frame.payload)} bytes for {frame.num_blocks} blocks; "
                f"must be {frame.num_blocks * layout.block_bytes}"
            )
        part = handoff.ranks[frame.rank]
        if part.committed:
            return f"a data frame after rank {frame.rank}'s commit"
        row = frame.layer * handoff.num_blocks
        if part.seen.find(1, row + frame.first_block, row + end) != -1:
            return f"layer {frame.layer}, blocks {frame.first_block} to {end}: came twice"
        return None

    def _commit(self, handoff: Handoff, frame: Frame, now: float) -> None:
        layout = self._known_layout()
        if handoff.state in (_S.COMMITTED, _S.CLAIMED):
            detail = "a second commit"
            self._table.refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        try:
            if handoff.state is not _S.RECEIVING or frame.rank >= layout.num_shards:
                raise MalformedFrame(f"a commit of rank {frame.rank} while {handoff.state.name}")
            part = handoff.ranks[frame.rank]
            if part.committed:
                raise MalformedFrame(f"rank {frame.rank} was committed before")
            if not verify(frame):
                raise MalformedFrame("the commit was altered", pb.REFUSAL_REASON_CHECKSUM)
            totals = Totals.decode(frame.payload)
            expected = layout.num_layers * handoff.num_blocks
            if totals != part.totals or part.num_seen != expected:
                raise MalformedFrame(
                    f"rank {frame.rank}: the commit says {totals}; {part.totals} arrived, "
                    f"{part.num_seen} of {expected} blocks",
                    pb.REFUSAL_REASON_INCOMPLETE,
                )
        except MalformedFrame as error:
            if error.reason == pb.REFUSAL_REASON_MALFORMED:
                self._table.fail(handoff, error.reason, str(error), now)
            else:
                self._table.interrupt(handoff, error.reason, str(error), now)
            return
        part.committed = True
        handoff.deadline = now + self._limits.idle_timeout_s
        if all(each.committed for each in handoff.ranks):
            handoff.deadline = now + self._limits.commit_ttl_s
            self._table.statistics.num_committed += 1
            if self._table.is_claimed_ahead(handoff.handoff_id) and self._can_grant_all(handoff):
                self._grant_all(handoff, now)
            else:
                self._table.advance(handoff, _S.COMMITTED)
            self._table.reply(handoff, pb.PushReply.KIND_COMMITTED)

    def _can_grant_all(self, handoff: Handoff) -> bool:
        """Otherwise it stays committed, and each rank claims its part when it loads."""
        num_frames = sum(len(part.frames) for part in handoff.ranks)
        return num_frames <= self._limits.max_frames_ahead

    def _grant_all(self, handoff: Handoff, now: float) -> None:
        # Until then nobody says when the load begins.
        for_a_load_s = LONG_HELD_S + self._limits.claim_timeout_s
        handoff.deadline = now + max(self._limits.commit_ttl_s, for_a_load_s)
        self._table.advance(handoff, _S.CLAIMED, quiet=True)
        grants = tuple(
            self._grant(handoff, rank, _in_order(part.frames))
            for rank, part in enumerate(handoff.ranks)
        )
        self._table.tell(replace(changed(handoff), grants=grants))

    def _known_layout(self) -> KvLayout:
        if self._layout is None:
            raise TransferRefused("the transfer service is not configured yet")
        return self._layout


def _in_order(frames: Sequence[ReceivedFrame]) -> list[ReceivedFrame]:
    return sorted(frames, key=lambda frame: (frame.layer, frame.first_block))


def _why_not_loaded(reason: pb.RefusalReason.ValueType, handoff: Handoff | None) -> str:
    if reason == pb.REFUSAL_REASON_CANCELLED:
        return "its request ended before it was loaded"
    if reason == pb.REFUSAL_REASON_EXPIRED:
        is_there = handoff is not None and handoff.state in (_S.COMMITTED, _S.CLAIMED)
        return "not loaded in time" if is_there else "not committed in time"
    if reason == pb.REFUSAL_REASON_CHECKSUM:
        return "its bytes were altered in staging"
    return "it holds something else than its request expects"
