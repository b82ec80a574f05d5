"""The receiving state machine: what may land in staging, and what may be loaded from it.

Pure and synchronous: time is a parameter, and everything to be told to somebody is returned. The
network never touches anything but the extent that belongs to one (handoff, epoch), and only a
handoff of which every block of every rank arrived exactly once, verified, can be claimed.

An epoch whose transport fails, or alters bytes, is interrupted: the handoff keeps its room for some
time, and its sender may send everything again as the next epoch, on another transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from baton.kvtransfer.arena import Arena, ArenaStatistics
from baton.kvtransfer.errors import MalformedFrame, NoRoom, TransferRefused
from baton.kvtransfer.frames import Frame, FrameKind, Totals, copy, position_digest, verify
from baton.kvtransfer.layout import KvLayout, mismatch
from baton.kvtransfer.receiving import (
    LONG_HELD_S,
    SENDER_AT_WORK,
    TRANSITIONS,
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
    Reply,
    changed,
    first_choice,
    parse_open,
)
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState


class Receiver:
    """Every handoff on its way to this worker.

    Streams are numbers that the caller gives out, never twice; one stream carries one handoff.

    Args:
        arena: of the receiving half of the segment; this object is its only user.
        memory: the whole segment, indexed by the arena's offsets.
        choose: takes one of an open's offers for what the stream will carry; MalformedFrame says
            that it can take none.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        limits: ReceiverLimits,
        choose: Callable[[int, pb.PushOpen], Choice] = first_choice,
    ) -> None:
        self._arena, self._memory, self._limits = arena, memory, limits
        self._choose = choose
        self._layout: KvLayout | None = None
        self._live: dict[bytes, Handoff] = {}
        # First come, first served; the value is not used.
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._ended: OrderedDict[bytes, Changed] = OrderedDict()
        # To be claimed for every rank as soon as they are committed; the value is not used.
        self._ahead: OrderedDict[bytes, None] = OrderedDict()
        self._streams: dict[int, bytes] = {}
        self._effects: list[Effect] = []
        self.statistics = ReceiverStatistics()

    def configure(self, layout: KvLayout) -> None:
        """What handoffs must look like; before anything else, once."""
        self._layout = layout

    def handle_frame(self, stream: int, frame: Frame, now: float) -> list[Effect]:
        """One frame that a stream carried."""
        if frame.kind is FrameKind.OPEN:
            self._open(stream, frame, now)
        elif (handoff := self._addressed(stream, frame)) is not None:
            self._take(handoff, frame, now)
        return self._taken()

    def handle_link_frame(self, link_id: str, frame: Frame, now: float) -> list[Effect]:
        """One frame that a link carried, of any handoff that chose the link."""
        live = self._live.get(frame.handoff_id)
        if live is None or live.epoch != frame.epoch or live.choice.link_id != link_id:
            # Nobody to tell: the sender hears of a handoff's end on its stream.
            self.statistics.refusals[pb.REFUSAL_REASON_UNKNOWN_HANDOFF] += 1
        elif frame.kind in (FrameKind.DATA, FrameKind.COMMIT):
            self._take(live, frame, now)
        else:
            detail = f"a link carries data and commits, not {frame.kind.name}"
            self._fail(live, pb.REFUSAL_REASON_MALFORMED, detail, now)
        return self._taken()

    def handle_link_lost(self, link_id: str, detail: str, now: float) -> list[Effect]:
        """A link ended, whyever: it interrupts the epochs that it carried."""
        for handoff in list(self._live.values()):
            if handoff.choice.link_id == link_id and handoff.state is _S.RECEIVING:
                self._interrupt(handoff, pb.REFUSAL_REASON_TRANSPORT, detail, now)
        return self._taken()

    def handle_malformed(self, stream: int, error: MalformedFrame, now: float) -> list[Effect]:
        """A stream carried something that is no frame: nothing it says can be trusted.

        One whose header's checksum is wrong was a frame, and was altered like any other.
        """
        handoff = self._live.get(self._streams.get(stream, b""))
        altered = error.reason == pb.REFUSAL_REASON_CHECKSUM
        if handoff is not None and altered and handoff.state is _S.RECEIVING:
            self._interrupt(handoff, error.reason, str(error), now)
        elif handoff is not None and handoff.state in SENDER_AT_WORK:
            self._fail(handoff, error.reason, str(error), now)
        else:
            self._refuse(stream, b"", 0, error.reason, str(error))
        return self._taken()

    def handle_stream_lost(self, stream: int, now: float) -> list[Effect]:
        """A stream ended, whyever; before the commit that is the end of its handoff."""
        handoff = self._live.get(self._streams.pop(stream, b""))
        if handoff is not None:
            handoff.stream = None
            if handoff.state in SENDER_AT_WORK:
                detail = "the sender's stream ended before the commit"
                incomplete = (pb.REFUSAL_REASON_INCOMPLETE, detail)
                self._fail(handoff, *(handoff.problem or incomplete), now)
        return self._taken()

    def serves(self, stream: int) -> bool:
        """Whether a stream carries a handoff that still wants its frames."""
        handoff = self._live.get(self._streams.get(stream, b""))
        return handoff is not None and handoff.state in SENDER_AT_WORK

    def claim(self, handoff_id: bytes, rank: int, now: float) -> tuple[Grant, list[Effect]]:
        """Lets one rank read its part of a committed handoff until it releases it.

        Raises:
            TransferRefused: not committed (any more), no such rank, or released by it.
        """
        handoff = self._live.get(handoff_id)
        if handoff is None or handoff.extent is None:
            raise TransferRefused(
                f"handoff {handoff_id.hex()} is {self._state_in_words(handoff_id)}"
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
            self._advance(handoff, _S.CLAIMED)
        return self._grant(handoff, rank, part.in_order), self._taken()

    def claim_ahead(self, handoff_id: bytes, now: float) -> list[Effect]:
        """Lets every rank read its part as soon as the handoff is committed, also before its open.

        From the commit on it is claimed, for as long as a commit lasts: nobody but its reader takes
        the staging away. Asked again once it is claimed, when its load begins, it lasts for a load
        from then on. One that has ended stays as it is, and so does one of too many frames.
        """
        handoff = self._live.get(handoff_id)
        if handoff is not None and handoff.state is _S.COMMITTED:
            if self._can_grant_all(handoff):
                self._grant_all(handoff, now)
        elif handoff is not None and handoff.state is _S.CLAIMED:
            handoff.deadline = max(handoff.deadline, now + self._limits.claim_timeout_s)
        elif handoff_id not in self._ended:
            self._ahead[handoff_id] = None
            if len(self._ahead) > self._limits.max_tombstones:
                self._ahead.popitem(last=False)
        return self._taken()

    def peek(self, handoff_id: bytes, rank: int, epoch: int, num_seen: int) -> Grant:
        """What has come of one rank's part; frames in the order in which they came.

        It gives no right to the staging: see LocalPeek in the contract.

        Args:
            handoff_id: of 16 bytes.
            rank: whose part.
            epoch: of the frames that were seen; those of another one are all new.
            num_seen: leading frames to leave out.

        Raises:
            TransferRefused: it has no staging, or is over, or no such rank.
        """
        handoff = self._live.get(handoff_id)
        readable = (_S.RECEIVING, _S.COMMITTED, _S.CLAIMED)
        if handoff is None or handoff.extent is None or handoff.state not in readable:
            words = handoff.state.name if handoff else self._state_in_words(handoff_id)
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
        handoff = self._live.get(handoff_id)
        if not_loaded:
            expired = not_loaded == pb.REFUSAL_REASON_EXPIRED
            self.statistics.num_expired += expired and handoff is not None
            self._give_up(handoff_id, not_loaded, _why_not_loaded(not_loaded, handoff), now)
            return self._taken()
        if handoff is None:
            if all_ranks and handoff_id not in self._ended:
                self._bury(Changed(handoff_id, 0, _S.RELEASED, detail="released before its open"))
            return self._taken()
        if 0 <= rank < len(handoff.ranks):
            handoff.ranks[rank].released = True
        if all_ranks or all(part.released for part in handoff.ranks):
            self._end(handoff, _S.RELEASED, pb.REFUSAL_REASON_CANCELLED, "released", now)
        return self._taken()

    def drop(self, handoff_id: bytes, now: float) -> list[Effect]:
        """No longer wanted; an open that comes later is refused.

        A claimed one ends with its release or the claim's time: somebody is reading it.
        """
        handoff = self._live.get(handoff_id)
        if handoff is None or handoff.state is not _S.CLAIMED:
            detail = "dropped by the receiving worker"
            self._give_up(handoff_id, pb.REFUSAL_REASON_CANCELLED, detail, now)
        return self._taken()

    def expire(self, now: float) -> list[Effect]:
        """Ends every handoff whose state has lasted too long."""
        for handoff in [each for each in self._live.values() if each.deadline <= now]:
            if handoff.state is _S.QUEUED and handoff.handoff_id in self._queue:
                detail = "no room in the receiver's staging in time"
                self._fail(handoff, pb.REFUSAL_REASON_NO_ROOM, detail, now)
            elif handoff.problem is not None and handoff.deadline <= now:
                self._fail(handoff, *handoff.problem, now)
            elif handoff.deadline <= now:
                self.statistics.num_expired += 1
                detail = f"{handoff.state.name} for too long"
                self._fail(handoff, pb.REFUSAL_REASON_EXPIRED, detail, now)
        return self._taken()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return min((handoff.deadline for handoff in self._live.values()), default=None)

    def known(self) -> Iterator[Changed]:
        """The state of every handoff that is live or remembered."""
        yield from self._ended.values()
        for handoff in self._live.values():
            yield changed(handoff)

    def arena_statistics(self) -> ArenaStatistics:
        """Of this side's staging."""
        return self._arena.statistics()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """For room."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the live handoffs hold what they should."""
        self._arena.check_integrity()
        holding = [handoff for handoff in self._live.values() if handoff.extent is not None]
        assert self._arena.statistics().num_extents == len(holding)
        for handoff in self._live.values():
            assert (handoff.state is _S.QUEUED) == (handoff.extent is None), handoff
            assert (handoff.state is _S.QUEUED) == (handoff.handoff_id in self._queue), handoff
            assert handoff.handoff_id not in self._ended, handoff
            if handoff.stream is not None:
                assert self._streams[handoff.stream] == handoff.handoff_id, handoff
        assert all(handoff_id in self._live for handoff_id in self._queue)
        for stream, handoff_id in self._streams.items():
            assert self._live[handoff_id].stream == stream, (stream, handoff_id)
        assert len(self._ended) <= self._limits.max_tombstones
        assert len(self._ahead) <= self._limits.max_tombstones
        assert self._ahead.keys().isdisjoint(self._ended)

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
        carried = self._streams.get(stream, handoff_id)
        if carried != handoff_id:
            detail = f"the stream carries handoff {carried.hex()}; one stream carries one handoff"
            self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_MALFORMED, detail)
            return
        if (ended := self._ended.get(handoff_id)) is not None:
            self._refuse(stream, handoff_id, epoch, *_why_ended(ended))
            return
        live = self._live.get(handoff_id)
        if live is not None:
            if live.state is _S.CLAIMED:
                detail = "it is being loaded"
                self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail)
                return
            if epoch <= live.epoch:
                detail = f"epoch is {epoch}; epoch {live.epoch} is open"
                if live.stream == stream and epoch == live.epoch and live.state in SENDER_AT_WORK:
                    self._fail(live, pb.REFUSAL_REASON_MALFORMED, detail, now)
                else:
                    self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail)
                return
        try:
            opened = parse_open(frame)
        except MalformedFrame as error:
            self._reject(stream, frame, live, error.reason, str(error), now)
            return
        num_bytes = layout.handoff_bytes(opened.num_blocks)
        if (differing := mismatch(layout.fingerprint(), opened.fingerprint)) is not None:
            detail = f"KV caches differ: {differing}"
            self._reject(stream, frame, live, pb.REFUSAL_REASON_FINGERPRINT, detail, now)
        elif not 1 <= opened.num_tokens <= opened.num_blocks * layout.block_size_tokens:
            detail = (
                f"num_tokens is {opened.num_tokens}; must be 1 to "
                f"{opened.num_blocks * layout.block_size_tokens} for {opened.num_blocks} blocks"
            )
            self._reject(stream, frame, live, pb.REFUSAL_REASON_MALFORMED, detail, now)
        elif not self._arena.fits_ever(num_bytes):
            total = self._arena.statistics().total_bytes
            detail = f"handoff of {num_bytes} bytes; the receiver's staging has {total}"
            self._reject(stream, frame, live, pb.REFUSAL_REASON_TOO_LARGE, detail, now)
        elif live is None and len(self._queue) >= self._limits.max_queued:
            detail = f"{len(self._queue)} handoffs wait for room already"
            self._reject(stream, frame, live, pb.REFUSAL_REASON_NO_ROOM, detail, now)
        else:
            try:
                choice = self._choose(stream, opened)
            except MalformedFrame as error:
                self._reject(stream, frame, live, error.reason, str(error), now)
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
            for _ in range(layout.tp_size)
        ]
        if live is None:
            live = Handoff(opened.handoff_id, 0, None, 0, 0, 0, _S.QUEUED, now, ranks, choice)
            self._live[live.handoff_id] = live
        elif live.stream is not None and live.stream != stream:
            if live.state in SENDER_AT_WORK:
                detail = f"superseded by epoch {opened.epoch}"
                self._refuse(
                    live.stream, live.handoff_id, live.epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail
                )
            del self._streams[live.stream]
        live.epoch, live.ranks, live.stream = opened.epoch, ranks, stream
        live.choice, live.problem = choice, None
        live.num_bytes_received = live.num_bytes_told = 0
        self._streams[stream] = live.handoff_id
        if live.extent is not None and live.num_bytes != num_bytes:
            self._arena.free(live.extent)
            live.extent = None
        live.num_blocks, live.num_tokens = opened.num_blocks, opened.num_tokens
        live.num_bytes = num_bytes
        if live.extent is not None:
            self._receive(live, now)
            return
        wait_s = min(opened.wait_ms / 1000, self._limits.max_wait_s)
        live.deadline = now + wait_s
        self._queue.setdefault(live.handoff_id)
        self._admit(now)
        if live.extent is None:
            self._advance(live, _S.QUEUED)

    def _admit(self, now: float) -> None:
        """Gives room to those that wait, in their order: a large one is not overtaken."""
        while self._queue:
            handoff = self._live[next(iter(self._queue))]
            try:
                handoff.extent = self._arena.allocate(handoff.num_bytes)
            except NoRoom:
                return
            del self._queue[handoff.handoff_id]
            self._receive(handoff, now)

    def _receive(self, handoff: Handoff, now: float) -> None:
        handoff.deadline = now + self._limits.idle_timeout_s
        self._advance(handoff, _S.RECEIVING)
        self._reply(handoff, pb.PushReply.KIND_OPENED)

    def _take(self, handoff: Handoff, frame: Frame, now: float) -> None:
        """A frame of a handoff's current epoch."""
        if frame.kind is FrameKind.ABORT:
            if handoff.state is not _S.CLAIMED:
                given_up = (pb.REFUSAL_REASON_CANCELLED, "the sender gave it up")
                self._fail(handoff, *(handoff.problem or given_up), now)
        elif handoff.state is _S.INTERRUPTED:
            # On its way when the sender was told.
            self.statistics.refusals[pb.REFUSAL_REASON_OLD_EPOCH] += 1
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
        live = self._live.get(handoff_id)
        if live is None:
            if (ended := self._ended.get(handoff_id)) is not None:
                self._refuse(stream, handoff_id, epoch, *_why_ended(ended))
            else:
                detail = "this handoff was never opened here"
                self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail)
        elif epoch < live.epoch:
            detail = f"epoch is {epoch}; epoch {live.epoch} is open"
            self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail)
        elif live.stream != stream or epoch != live.epoch:
            detail = f"epoch {epoch} of this handoff was not opened on this stream"
            self._refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_UNKNOWN_HANDOFF, detail)
        else:
            return live
        return None

    def _data(self, handoff: Handoff, frame: Frame, now: float) -> None:
        layout = self._known_layout()
        if handoff.state in (_S.COMMITTED, _S.CLAIMED):
            detail = "a data frame after the commit"
            self._refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        if (problem := self._problem(handoff, frame)) is not None:
            self._fail(handoff, pb.REFUSAL_REASON_MALFORMED, problem, now)
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
            self._interrupt(handoff, pb.REFUSAL_REASON_CHECKSUM, detail, now)
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
        self.statistics.num_bytes[handoff.choice.transport] += len(frame.payload)
        self.statistics.num_frames[handoff.choice.transport] += 1
        handoff.num_bytes_received += len(frame.payload)
        untold = handoff.num_bytes_received - handoff.num_bytes_told
        # By halves of what is left, in the end: what is not loaded early the request waits for.
        left = handoff.num_bytes - handoff.num_bytes_received
        if untold >= self._limits.progress_bytes or 0 < left <= untold:
            handoff.num_bytes_told = handoff.num_bytes_received
            self._effects.append(changed(handoff))

    def _problem(self, handoff: Handoff, frame: Frame) -> str | None:
        """What is wrong with a data frame's place or size, in words."""
        layout = self._known_layout()
        if handoff.state is not _S.RECEIVING:
            return "a data frame before the handoff was opened"
        if frame.rank >= layout.tp_size:
            return f"rank is {frame.rank}; must be below {layout.tp_size}"
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
            self._refuse(
                handoff.stream, handoff.handoff_id, frame.epoch, pb.REFUSAL_REASON_MALFORMED, detail
            )
            return
        try:
            if handoff.state is not _S.RECEIVING or frame.rank >= layout.tp_size:
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
                self._fail(handoff, error.reason, str(error), now)
            else:
                self._interrupt(handoff, error.reason, str(error), now)
            return
        part.committed = True
        handoff.deadline = now + self._limits.idle_timeout_s
        if all(each.committed for each in handoff.ranks):
            handoff.deadline = now + self._limits.commit_ttl_s
            self.statistics.num_committed += 1
            if handoff.handoff_id in self._ahead and self._can_grant_all(handoff):
                self._grant_all(handoff, now)
            else:
                self._advance(handoff, _S.COMMITTED)
            self._reply(handoff, pb.PushReply.KIND_COMMITTED)

    def _can_grant_all(self, handoff: Handoff) -> bool:
        """Otherwise it stays committed, and each rank claims its part when it loads."""
        num_frames = sum(len(part.frames) for part in handoff.ranks)
        return num_frames <= self._limits.max_frames_ahead

    def _grant_all(self, handoff: Handoff, now: float) -> None:
        # Until then nobody says when the load begins.
        for_a_load_s = LONG_HELD_S + self._limits.claim_timeout_s
        handoff.deadline = now + max(self._limits.commit_ttl_s, for_a_load_s)
        self._advance(handoff, _S.CLAIMED, quiet=True)
        grants = tuple(
            self._grant(handoff, rank, _in_order(part.frames))
            for rank, part in enumerate(handoff.ranks)
        )
        self._effects.append(replace(changed(handoff), grants=grants))

    def _interrupt(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """The epoch is over; the sender may open the next one in the same room."""
        self._refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        handoff.problem = reason, detail
        handoff.deadline = now + self._limits.retry_timeout_s
        self._advance(handoff, _S.INTERRUPTED)

    def _fail(
        self, handoff: Handoff, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        self.statistics.num_failed += 1
        self._end(handoff, _S.FAILED, reason, detail, now)

    def _give_up(
        self, handoff_id: bytes, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """Fails it here, also before its open; one that has ended stays as it is."""
        if (handoff := self._live.get(handoff_id)) is not None:
            self._fail(handoff, reason, detail, now)
        elif handoff_id not in self._ended:
            self._bury(Changed(handoff_id, 0, _S.FAILED, reason=reason, detail=detail))

    def _end(
        self,
        handoff: Handoff,
        state: ReceiveState,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
    ) -> None:
        """The one way out: gives back everything, tells everybody, lets the next ones in."""
        if handoff.state in SENDER_AT_WORK and handoff.stream is not None:
            self._refuse(handoff.stream, handoff.handoff_id, handoff.epoch, reason, detail)
        if handoff.stream is not None:
            del self._streams[handoff.stream]
        self._advance(handoff, state, quiet=True)
        if handoff.extent is not None:
            self._arena.free(handoff.extent)
            handoff.extent = None
        self._queue.pop(handoff.handoff_id, None)
        del self._live[handoff.handoff_id]
        if state is _S.RELEASED:
            reason, detail = pb.REFUSAL_REASON_UNSPECIFIED, ""
        self._bury(changed(handoff, reason, detail))
        self._admit(now)

    def _reject(
        self,
        stream: int,
        frame: Frame,
        live: Handoff | None,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
    ) -> None:
        """An open that cannot be: the handoff is over, also as it was in an older epoch."""
        self._refuse(stream, frame.handoff_id, frame.epoch, reason, detail)
        if live is not None:
            if live.stream == stream:
                del self._streams[stream]
                live.stream = None
            self._fail(live, reason, detail, now)
        else:
            self.statistics.num_failed += 1
            self._bury(
                Changed(frame.handoff_id, frame.epoch, _S.FAILED, reason=reason, detail=detail)
            )

    def _bury(self, ended: Changed) -> None:
        self._ahead.pop(ended.handoff_id, None)
        self._ended[ended.handoff_id] = ended
        if len(self._ended) > self._limits.max_tombstones:
            self._ended.popitem(last=False)
        self._effects.append(ended)

    def _advance(self, handoff: Handoff, state: ReceiveState, *, quiet: bool = False) -> None:
        if state not in TRANSITIONS[handoff.state]:
            raise AssertionError(f"{handoff.state.name} to {state.name} is not in the table")
        handoff.state = state
        if not quiet:
            self._effects.append(changed(handoff))

    def _reply(self, handoff: Handoff, kind: pb.PushReply.Kind.ValueType) -> None:
        if handoff.stream is not None:
            reply = Reply(handoff.stream, kind, handoff.handoff_id, handoff.epoch)
            if kind == pb.PushReply.KIND_OPENED:
                chosen = handoff.choice
                reply = replace(reply, transport=chosen.transport, transport_reason=chosen.reason)
            self._effects.append(reply)

    def _refuse(
        self,
        stream: int | None,
        handoff_id: bytes,
        epoch: int,
        reason: pb.RefusalReason.ValueType,
        detail: str,
    ) -> None:
        self.statistics.refusals[reason] += 1
        if stream is not None:
            kind = pb.PushReply.KIND_REFUSED
            self._effects.append(Reply(stream, kind, handoff_id, epoch, reason, detail))

    def _state_in_words(self, handoff_id: bytes) -> str:
        ended = self._ended.get(handoff_id)
        if ended is None:
            return "not known" if handoff_id not in self._live else "waiting for room"
        return f"{ended.state.name}{': ' if ended.detail else ''}{ended.detail}"

    def _known_layout(self) -> KvLayout:
        if self._layout is None:
            raise TransferRefused("the transfer service is not configured yet")
        return self._layout

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects


def _in_order(frames: Sequence[ReceivedFrame]) -> list[ReceivedFrame]:
    return sorted(frames, key=lambda frame: (frame.layer, frame.first_block))


def _why_ended(ended: Changed) -> tuple[pb.RefusalReason.ValueType, str]:
    if ended.state is _S.RELEASED:
        return pb.REFUSAL_REASON_UNKNOWN_HANDOFF, "it was loaded or released already"
    return ended.reason, f"it has failed already: {ended.detail}"


def _why_not_loaded(reason: pb.RefusalReason.ValueType, handoff: Handoff | None) -> str:
    if reason == pb.REFUSAL_REASON_CANCELLED:
        return "its request ended before it was loaded"
    if reason == pb.REFUSAL_REASON_EXPIRED:
        is_there = handoff is not None and handoff.state in (_S.COMMITTED, _S.CLAIMED)
        return "not loaded in time" if is_there else "not committed in time"
    if reason == pb.REFUSAL_REASON_CHECKSUM:
        return "its bytes were altered in staging"
    return "it holds something else than its request expects"
