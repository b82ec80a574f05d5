"""The sending state machine: which bytes of staging may leave, and when they are free again.

Pure and synchronous like the receiver's. Engine ranks fill a handoff's extent and say so; what was
filled waits here until the receiver has opened the handoff, and is then handed out in batches of
frames. A restart forgets everything handed in under the older epoch in the same instant in which it
raises the epoch, so that no old byte can leave under the new one.

Staging keeps everything that was filled until the receiver has verified it. So a transport that
fails costs a send nothing but time: it goes on as the next epoch, on the next transport, from the
first byte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena, ArenaStatistics, Extent
from baton.kvtransfer.errors import NoRoom, TransferRefused
from baton.kvtransfer.frames import FrameKind, Totals, position_digest
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.sending import (
    OVER,
    TRANSITIONS,
    Batch,
    Effect,
    Filled,
    NotReserved,
    Outgoing,
    OutgoingBlocks,
    Reserved,
    Send,
    SenderLimits,
    SenderStatistics,
    SenderTransports,
    SendState,
    StartPush,
    StopPush,
    Wake,
    ended,
)
from baton.runtime.kv_transports import UNNAMED_TRANSPORT
from baton.v1 import kv_transfer_pb2 as pb

_S = SendState
# Refusals of an epoch after which the next may do better on another transport.
_WORTH_ANOTHER = frozenset(
    {pb.REFUSAL_REASON_TRANSPORT, pb.REFUSAL_REASON_CHECKSUM, pb.REFUSAL_REASON_INCOMPLETE}
)
# A batch of references may stand for this many times the bytes of a batch that carries its bytes.
# References are small, but the receiver copies all their blocks before it takes another message.
_BYTES_BY_REFERENCE = 4


class Sender:
    """Every handoff on its way from this worker.

    Args:
        arena: of the sending half of the segment; this object is its only user.
        memory: the whole segment, indexed by the arena's offsets.
        transports: The transports that may carry handoffs.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        limits: SenderLimits,
        transports: SenderTransports,
    ) -> None:
        self._arena, self._memory, self._limits = arena, memory, limits
        self._transports = transports
        self._layout: KvLayout | None = None
        # Those that are over stay while their extents linger.
        self._sends: dict[bytes, Send] = {}
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._effects: list[Effect] = []
        self.statistics = SenderStatistics()

    def configure(self, layout: KvLayout) -> None:
        """Sets what handoffs look like; called once, before anything else."""
        self._layout = layout

    def open(
        self,
        handoff_id: bytes,
        target: str,
        num_blocks: int,
        num_tokens: int,
        wait_s: float,
        epoch: int,
        now: float,
    ) -> list[Effect]:
        """Reserves staging, or waits for it; then begins to open the handoff at the target.

        Raises:
            TransferRefused: it cannot be, whatever the wait.
        """
        layout = self._known_layout()
        if len(handoff_id) != frames.HANDOFF_ID_BYTES:
            raise TransferRefused(f"handoff_id has {len(handoff_id)} bytes; must have 16")
        if not 1 <= num_tokens <= num_blocks * layout.block_size_tokens:
            raise TransferRefused(
                f"num_tokens is {num_tokens}; must be 1 to "
                f"{num_blocks * layout.block_size_tokens} for {num_blocks} blocks"
            )
        if handoff_id in self._sends:
            raise TransferRefused(f"handoff {handoff_id.hex()} is being sent already")
        if len(self._sends) >= self._limits.max_sends:
            raise TransferRefused(f"{len(self._sends)} handoffs are being sent already")
        num_bytes = layout.handoff_bytes(num_blocks)
        if not self._arena.fits_ever(num_bytes):
            total = self._arena.statistics().total_bytes
            raise TransferRefused(f"handoff of {num_bytes} bytes; the sender's staging has {total}")
        until = now + min(wait_s, self._limits.max_wait_s)
        totals, last = [Totals()] * layout.num_shards, [False] * layout.num_shards
        epoch = epoch or 1
        self._sends[handoff_id] = Send(
            handoff_id, target, num_blocks, num_tokens, num_bytes, epoch, epoch, _S.WAITING, until,
            until, totals, last, now,
        )  # fmt: skip
        self._queue[handoff_id] = None
        self._admit(now)
        return self._taken()

    def fill(self, filled: pb.LocalFrame, now: float) -> list[Effect]:
        """A rank has filled blocks of staging. Ones of unknown sends and older epochs are ignored.

        A newer epoch than known is a restart that the sending rank heard of first. Of a send that
        is over, the ranks' last frames free the extent.
        """
        send = self._sends.get(filled.handoff_id)
        if send is None or filled.epoch < send.writer_epoch:
            return self._taken()
        if send.state in OVER:
            if filled.last and filled.rank < len(send.last):
                send.last[filled.rank] = True
                if all(send.last):
                    self._forget(send, now)
            return self._taken()
        if (problem := self._problem(send, filled)) is not None:
            self._fail(send, pb.REFUSAL_REASON_MALFORMED, problem, now)
            return self._taken()
        if filled.epoch > send.writer_epoch:
            self._restart(send, filled.epoch, now)
        if filled.num_blocks:
            send.filled.append(
                Filled(
                    filled.rank,
                    filled.layer,
                    filled.first_block,
                    filled.num_blocks,
                    filled.checksum,
                )
            )
        if filled.last:
            send.last[filled.rank] = True
            send.filled.append(Filled(filled.rank))
        send.last_filled_at = now
        if send.state is _S.SENDING:
            send.deadline = now + self._limits.idle_timeout_s
            self._effects.append(Wake(send.handoff_id))
        return self._taken()

    def restart(self, handoff_id: bytes, epoch: int, now: float) -> list[Effect]:
        """Voids everything filled so far. Idempotent; an older epoch is ignored.

        Raises:
            TransferRefused: the send is over or unknown; its staging is somebody else's.
        """
        send = self._sends.get(handoff_id)
        if send is None or send.state in OVER:
            raise TransferRefused(f"handoff {handoff_id.hex()} is not being sent")
        if epoch > send.writer_epoch:
            self._restart(send, epoch, now)
        return self._taken()

    def abort(self, handoff_id: bytes, now: float, *, is_known: bool = True) -> list[Effect]:
        """Gives up a send that nobody wants or writes. Idempotent; unknown ids are ignored.

        Args:
            handoff_id: of the send.
            now: by time.monotonic.
            is_known: to the main process, which otherwise hears of it as of one that failed.
        """
        send = self._sends.get(handoff_id)
        if send is None:
            return self._taken()
        if send.state not in OVER and is_known:
            self._end(send, _S.ABORTED, now, "aborted", farewell=True)
        elif send.state not in OVER:
            reason, detail = pb.REFUSAL_REASON_CANCELLED, "the engine gave it up"
            self._fail(send, reason, detail, now, farewell=True)
        send.deadline = min(send.deadline, now + self._limits.linger_s)
        return self._taken()

    def handle_reply(self, reply: pb.PushReply, handoff_id: bytes, now: float) -> list[Effect]:
        """Applies an answer of a send's receiver.

        Answers to older epochs are ignored, but for a commit: with that a receiver has taken the
        last that it takes from a stream, so a newer epoch's open never came to it.
        """
        send = self._sends.get(handoff_id)
        if send is None or send.state in OVER:
            return self._taken()
        if reply.kind == pb.PushReply.KIND_REFUSED and reply.epoch in (0, send.epoch):
            self.statistics.refusals[reply.reason] += 1
            if send.transport and reply.reason in _WORTH_ANOTHER:
                self._fall_back(send, reply.reason, reply.detail, now)
            else:
                self._fail(send, reply.reason, reply.detail, now)
        elif reply.kind == pb.PushReply.KIND_COMMITTED:
            if reply.epoch == send.sent[0] and send.state in (_S.OPENING, _S.COMMITTING):
                send.epoch, send.transport, send.num_frames = send.sent
                self._end(send, _S.COMMITTED, now, "")
        elif reply.kind == pb.PushReply.KIND_OPENED:
            # Not of an open that has yet to leave: that receiver is not what it should be.
            is_asked = send.state is _S.OPENING and not send.open_due
            if is_asked and reply.epoch == send.epoch:
                self._opened(send, reply.transport, now)
        return self._taken()

    def handle_link_lost(self, link_id: str, detail: str, now: float) -> list[Effect]:
        """A link ended, whyever: what it carries goes on without it.

        What has left whole may have arrived whole: with no transport left, its receiver's word is
        waited for.
        """
        for send in list(self._sends.values()):
            if send.link_id != link_id or send.state not in (_S.SENDING, _S.COMMITTING):
                continue
            tried = {*send.tried, send.transport}
            if send.state is _S.SENDING or self._transports.offers(send.target, tried):
                self._fall_back(send, pb.REFUSAL_REASON_TRANSPORT, detail, now)
        return self._taken()

    def handle_push_lost(self, handoff_id: bytes, detail: str, now: float) -> list[Effect]:
        """The stream of a send ended; before the commit that is the end of it."""
        send = self._sends.get(handoff_id)
        if send is not None and send.state not in OVER:
            self._fail(send, pb.REFUSAL_REASON_UNSPECIFIED, detail, now)
        return self._taken()

    def next_batch(self, handoff_id: bytes, max_bytes: int, now: float) -> Batch | None:
        """The next frames to send, about max_bytes of blocks; None: wait for a Wake.

        The caller reads the payloads before it lets anything else happen, or sends them by a link,
        whose other end finds out when they have changed meanwhile.

        Raises:
            TransferRefused: nothing can carry it to its target.
        """
        send = self._sends.get(handoff_id)
        if send is None or send.state in OVER or send.extent is None:
            return None
        if send.open_due:
            send.open_due = False
            send.offers = self._transports.offers(send.target, send.tried)
            if not send.offers:
                raise TransferRefused(f"no transport to {send.target}")
            return Batch([self._open_frame(send, now)], send.epoch)
        batch, room = list[Outgoing](), max_bytes
        while send.state is _S.SENDING and send.num_sent < len(send.filled) and room > 0:
            filled = send.filled[send.num_sent]
            send.num_sent += 1
            frame = self._frame(send, filled, send.extent)
            batch.append(frame)
            num_bytes = filled.num_blocks * self._known_layout().block_bytes
            room -= frames.HEADER_BYTES
            room -= num_bytes if frame.payload else num_bytes // _BYTES_BY_REFERENCE
            if send.num_commits == len(send.last):
                self._advance(send, _S.COMMITTING)
                send.sent = send.epoch, send.transport, send.num_frames
        if not batch:
            return None
        send.deadline = now + self._limits.idle_timeout_s
        return Batch(batch, send.epoch, send.transport, send.link_id)

    def handle_written(self, handoff_id: bytes, now: float) -> None:
        """The transport has taken a batch."""
        send = self._sends.get(handoff_id)
        if send is not None and send.state in (_S.SENDING, _S.COMMITTING):
            send.deadline = now + self._limits.idle_timeout_s

    def offered(self, handoff_id: bytes) -> Container[str]:
        """Transports that a send's last open offered."""
        send = self._sends.get(handoff_id)
        return [offer.name for offer in send.offers] if send is not None else ()

    def expire(self, now: float) -> list[Effect]:
        """Ends every send whose state has lasted too long, and frees what has lingered."""
        for send in [each for each in self._sends.values() if each.deadline <= now]:
            if send.state in OVER:
                self._forget(send, now)
            elif send.deadline > now:
                continue
            elif send.state is _S.WAITING:
                self._fail(send, pb.REFUSAL_REASON_NO_ROOM, "no room in the sender's staging", now)
            else:
                self.statistics.num_expired += 1
                detail = f"{send.state.value} for too long"
                self._fail(send, pb.REFUSAL_REASON_EXPIRED, detail, now, farewell=True)
        return self._taken()

    def next_deadline(self) -> float | None:
        """When `expire` has something to do, at the earliest."""
        return min((send.deadline for send in self._sends.values()), default=None)

    def arena_statistics(self) -> ArenaStatistics:
        """Usage of this side's staging."""
        return self._arena.statistics()

    @property
    def num_live(self) -> int:
        return sum(send.state not in OVER for send in self._sends.values())

    @property
    def num_waiting(self) -> int:
        """Sends that wait for room."""
        return len(self._queue)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the known sends hold what they should."""
        self._arena.check_integrity()
        holding = [send for send in self._sends.values() if send.extent is not None]
        assert self._arena.statistics().num_extents == len(holding)
        for send in self._sends.values():
            assert (send.state is _S.WAITING) == (send.extent is None), send
            assert (send.state is _S.WAITING) == (send.handoff_id in self._queue), send
        assert all(handoff_id in self._sends for handoff_id in self._queue)

    def _admit(self, now: float) -> None:
        while self._queue:
            send = self._sends[next(iter(self._queue))]
            try:
                send.extent = self._arena.allocate(send.num_bytes)
            except NoRoom:
                return
            del self._queue[send.handoff_id]
            send.reserved_at = now
            self._effects.append(Reserved(send.handoff_id, send.extent.offset))
            self._effects.append(StartPush(send.handoff_id, send.target))
            self._reopen(send, now)

    def _restart(self, send: Send, writer_epoch: int, now: float) -> None:
        """What was filled is void."""
        send.writer_epoch = writer_epoch
        send.filled.clear()
        send.last = [False] * len(send.last)
        if send.state is not _S.WAITING:
            send.epoch += 1
            self._reopen(send, now)

    def _fall_back(
        self, send: Send, reason: pb.RefusalReason.ValueType, detail: str, now: float
    ) -> None:
        """The epoch's transport has failed: the same bytes again, on what is left."""
        send.tried.add(send.transport)
        if not self._transports.offers(send.target, send.tried):
            self._fail(send, reason, detail, now, farewell=True)
            return
        self.statistics.num_fallbacks[send.transport] += 1
        send.num_fallbacks += 1
        send.epoch += 1
        self._reopen(send, now)

    def _reopen(self, send: Send, now: float) -> None:
        self._advance(send, _S.OPENING)
        send.totals = [Totals()] * len(send.totals)
        send.num_commits = send.num_sent = send.num_frames = 0
        send.transport = send.link_id = ""
        send.open_due = True
        send.deadline = max(send.wait_until, now) + self._limits.reply_grace_s
        self._effects.append(Wake(send.handoff_id))

    def _opened(self, send: Send, transport: str, now: float) -> None:
        offered = {offer.name: offer for offer in send.offers}
        transport = transport or UNNAMED_TRANSPORT
        if transport not in offered:
            detail = f"the receiver chose {transport!r}, which was not offered"
            self._fail(send, pb.REFUSAL_REASON_MALFORMED, detail, now, farewell=True)
            return
        send.transport, send.link_id = transport, offered[transport].link_id
        send.receiver_opened_at = now
        send.deadline = now + self._limits.idle_timeout_s
        self._advance(send, _S.SENDING)
        self._effects.append(Wake(send.handoff_id))

    def _open_frame(self, send: Send, now: float) -> Outgoing:
        message = pb.PushOpen(
            handoff_id=send.handoff_id,
            epoch=send.epoch,
            fingerprint=self._known_layout().fingerprint(),
            num_blocks=send.num_blocks,
            num_tokens=send.num_tokens,
            wait_ms=max(0, round((send.wait_until - now) * 1000)),
            offers=send.offers,
        )
        return Outgoing(frames.encode_open(message), memoryview(b""))

    def _frame(self, send: Send, filled: Filled, extent: Extent) -> Outgoing:
        if not filled.num_blocks:
            send.num_commits += 1
            totals = send.totals[filled.rank].encode()
            commit = frames.encode(
                FrameKind.COMMIT, send.handoff_id, send.epoch, totals, rank=filled.rank
            )
            return Outgoing(commit, memoryview(b""))
        layout = self._known_layout()
        num_bytes = filled.num_blocks * layout.block_bytes
        start = extent.offset + layout.offset(
            filled.rank, filled.layer, filled.first_block, send.num_blocks
        )
        digest = position_digest(
            filled.rank, filled.layer, filled.first_block, filled.num_blocks, filled.checksum
        )
        send.totals[filled.rank] = send.totals[filled.rank].plus(num_bytes, digest)
        send.num_frames += 1
        self.statistics.num_bytes[send.transport] += num_bytes
        self.statistics.num_frames[send.transport] += 1
        blocks = OutgoingBlocks(
            send.handoff_id,
            send.epoch,
            filled.rank,
            filled.layer,
            filled.first_block,
            filled.num_blocks,
            filled.checksum,
            start,
            self._memory[start : start + num_bytes],
        )
        return self._transports.frame(send.transport, blocks)

    def _problem(self, send: Send, filled: pb.LocalFrame) -> str | None:
        """What is wrong with a rank's notification: it must not name bytes outside its extent."""
        layout = self._known_layout()
        if send.state is _S.WAITING:
            return "filled before its staging was reserved"
        if filled.rank >= layout.num_shards or filled.layer >= layout.num_layers:
            return f"rank {filled.rank}, layer {filled.layer} were filled: no such rank or layer"
        end = filled.first_block + filled.num_blocks
        if end > send.num_blocks:
            return f"blocks up to {end} were filled; the handoff has {send.num_blocks}"
        if filled.num_blocks * layout.block_bytes > frames.MAX_PAYLOAD_BYTES:
            return (
                f"a frame of {filled.num_blocks * layout.block_bytes} bytes was filled; "
                f"at most {frames.MAX_PAYLOAD_BYTES}"
            )
        if filled.epoch == send.writer_epoch and send.last[filled.rank]:
            return f"rank {filled.rank} filled more after its last frame"
        return None

    def _fail(
        self,
        send: Send,
        reason: pb.RefusalReason.ValueType,
        detail: str,
        now: float,
        *,
        farewell: bool = False,
    ) -> None:
        self._end(send, _S.FAILED, now, detail, reason, farewell=farewell)

    def _end(
        self,
        send: Send,
        state: SendState,
        now: float,
        detail: str,
        reason: pb.RefusalReason.ValueType = pb.REFUSAL_REASON_UNSPECIFIED,
        *,
        farewell: bool = False,
    ) -> None:
        """The one way a send ends; frees its staging, if need be once its writer has stopped."""
        if send.state is _S.WAITING:
            del self._queue[send.handoff_id]
            self._effects.append(NotReserved(send.handoff_id, detail))
        else:
            goodbye = None
            if farewell:
                goodbye = frames.encode(FrameKind.ABORT, send.handoff_id, send.epoch)
            self._effects.append(StopPush(send.handoff_id, goodbye))
            if state is not _S.ABORTED:
                self._effects.append(ended(send, state, reason, detail, now))
        if state is _S.COMMITTED:
            self.statistics.num_committed[send.transport] += 1
        self.statistics.num_failed += state is _S.FAILED
        self._advance(send, state)
        send.filled.clear()
        is_told = state is _S.ABORTED
        send.deadline = now + (self._limits.linger_s if is_told else self._limits.writer_timeout_s)
        if send.extent is None or all(send.last):
            self._forget(send, now)

    def _forget(self, send: Send, now: float) -> None:
        if send.extent is not None:
            self._arena.free(send.extent)
            send.extent = None
        del self._sends[send.handoff_id]
        self._admit(now)

    def _advance(self, send: Send, state: SendState) -> None:
        if state not in TRANSITIONS[send.state]:
            raise AssertionError(f"{send.state.name} to {state.name} is not in the table")
        send.state = state

    def _known_layout(self) -> KvLayout:
        if self._layout is None:
            raise TransferRefused("the transfer service is not configured yet")
        return self._layout

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
