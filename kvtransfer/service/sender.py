"""The sending state machine: which bytes of staging may leave, and when staging is free again.

Pure and synchronous like the receiver's: time is a parameter, and effects are returned. Engine
ranks fill the extent of a handoff, each block once, and report what they filled. The filled blocks
wait until the receiver has opened the handoff, and `next_batch` then returns them as frames.

Staging keeps everything that was filled until the receiver has verified it. So when a transport
fails, the send goes on as the next epoch, on the next transport, from the first byte.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import product

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena, ArenaStatistics, Extent
from baton.kvtransfer.errors import TransferRefused, shortened
from baton.kvtransfer.frames import Totals
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service import send_frames
from baton.kvtransfer.service.send_frames import fill_problem
from baton.kvtransfer.service.send_state import (
    OVER,
    Effect,
    FilledRun,
    Send,
    SenderLimits,
    SenderStatistics,
    SenderTransports,
    SendState,
    Wake,
)
from baton.kvtransfer.service.send_table import SendTable
from baton.kvtransfer.transports.outgoing import OutgoingFrame
from baton.runtime.kv.kv_transports import UNNAMED_TRANSPORT
from baton.v1 import kv_transfer_pb2 as pb

_S = SendState
# Refusals after which the next epoch may succeed on another transport.
_WORTH_ANOTHER = frozenset(
    {pb.REFUSAL_REASON_TRANSPORT, pb.REFUSAL_REASON_CHECKSUM, pb.REFUSAL_REASON_INCOMPLETE}
)
# A batch of references may stand for this many times the bytes of a batch that carries its bytes:
# references are small, and the receiver begins to read the first batch while the next is made.
_BYTES_BY_REFERENCE = 4


class Sender:
    """The handoffs from this worker to others.

    Args:
        arena: Arena of the sending half of the segment; this object is its only user.
        memory: The whole segment, indexed by the arena's offsets.
        limits: How long each state may last.
        transports: The transports that may carry handoffs.
    """

    def __init__(
        self,
        arena: Arena,
        memory: memoryview,
        limits: SenderLimits,
        transports: SenderTransports,
    ) -> None:
        self._memory, self._limits = memory, limits
        self._transports = transports
        self._layout: KvLayout | None = None
        self._table = SendTable(arena, limits, transports)

    def configure(self, layout: KvLayout) -> None:
        """Sets the layout of the KV cache; called once, before anything else."""
        self._layout = layout

    def open(
        self,
        handoff_id: bytes,
        target: str,
        num_blocks: int,
        num_tokens: int,
        wait_s: float,
        now: float,
    ) -> list[Effect]:
        """Reserves staging, or waits for it; then begins to open the handoff at the target.

        Args:
            handoff_id: 16 random bytes.
            target: host:port of the receiving worker's transfer service.
            num_blocks: Number of KV blocks of each layer.
            num_tokens: Number of prompt tokens in the blocks.
            wait_s: Longest wait for staging here and at the receiver together, in seconds.
            now: Current time.monotonic(), in seconds.

        Raises:
            TransferRefused: The arguments are wrong, or waiting cannot help.
        """
        layout = self._known_layout()
        if len(handoff_id) != frames.HANDOFF_ID_BYTES:
            raise TransferRefused(f"handoff_id has {len(handoff_id)} bytes; must have 16")
        _check_num_tokens(num_tokens, num_blocks, layout)
        if handoff_id in self._table.sends:
            raise TransferRefused(f"handoff {handoff_id.hex()} is being sent already")
        if len(self._table.sends) >= self._limits.max_sends:
            raise TransferRefused(
                f"{len(self._table.sends)} handoffs are being sent already",
                pb.REFUSAL_REASON_NO_ROOM,
            )
        num_bytes = layout.handoff_bytes(num_blocks)
        if not self._table.queue.fits_ever(num_bytes):
            total = self._table.queue.statistics().total_bytes
            raise TransferRefused(
                f"handoff of {num_bytes} bytes; the sender's staging has {total}",
                pb.REFUSAL_REASON_TOO_LARGE,
            )
        until = now + min(wait_s, self._limits.max_wait_s)
        totals = [Totals()] * layout.num_shards
        writers = set(product(range(layout.num_shards), range(layout.pp_size)))
        self._table.sends[handoff_id] = Send(
            handoff_id, target, num_blocks, num_tokens, num_bytes, 1, _S.WAITING, until, until,
            totals, writers, now,
        )  # fmt: skip
        self._table.queue.add(handoff_id, num_bytes)
        self._table.admit(now)
        return self._table.take_effects()

    def shrink(
        self, handoff_id: bytes, num_blocks: int, num_tokens: int, now: float
    ) -> tuple[int, list[Effect]]:
        """Makes a send smaller, of which nothing is filled yet, and opens it again.

        Args:
            handoff_id: ID of the handoff.
            num_blocks: New number of KV blocks of each layer; at most as many as before.
            num_tokens: Number of prompt tokens in the blocks.
            now: Current time.monotonic(), in seconds.

        Returns:
            The offset of the handoff's bytes, and the effects.

        Raises:
            TransferRefused: The arguments are wrong, or the send is over or has filled blocks.
        """
        layout, send = self._known_layout(), self._table.sends.get(handoff_id)
        if send is None or send.state in OVER or send.extent is None:
            raise TransferRefused(f"handoff {handoff_id.hex()} is not being sent")
        if send.filled:
            raise TransferRefused(f"handoff {handoff_id.hex()}: some of its blocks are filled")
        if not 1 <= num_blocks <= send.num_blocks:
            raise TransferRefused(
                f"num_blocks is {num_blocks}; must be 1 to {send.num_blocks}, its size so far"
            )
        _check_num_tokens(num_tokens, num_blocks, layout)
        send.num_blocks, send.num_tokens = num_blocks, num_tokens
        send.num_bytes = layout.handoff_bytes(num_blocks)
        self._table.next_epoch(send, now)
        return send.extent.offset, self._table.take_effects()

    def fill(self, filled: pb.LocalFrame, now: float) -> list[Effect]:
        """Takes a rank's report of filled blocks; ignores unknown sends.

        When a send is over, the last frames of all ranks free its extent.
        """
        send = self._table.sends.get(filled.handoff_id)
        if send is None:
            return self._table.take_effects()
        if send.state in OVER:
            if filled.last:
                send.writers.discard((filled.shard, filled.stage))
                if not send.writers:
                    self._table.forget(send, now)
            return self._table.take_effects()
        if (problem := fill_problem(send, filled, self._known_layout())) is not None:
            self._table.fail(send, pb.REFUSAL_REASON_MALFORMED, problem, now)
            return self._table.take_effects()
        if filled.num_blocks:
            send.filled.append(
                FilledRun(
                    filled.shard,
                    filled.layer,
                    filled.first_block,
                    filled.num_blocks,
                    filled.checksum,
                )
            )
        if filled.last:
            send.writers.remove((filled.shard, filled.stage))
            if all(shard != filled.shard for shard, _ in send.writers):
                # All stages have filled their layers of the shard.
                send.filled.append(FilledRun(filled.shard))
        send.last_filled_at = now
        if send.state is _S.SENDING:
            send.deadline = now + self._limits.idle_timeout_s
            self._table.add_effect(Wake(send.handoff_id))
        return self._table.take_effects()

    def abort(self, handoff_id: bytes, now: float, *, by_main: bool = True) -> list[Effect]:
        """Gives up a send. Idempotent; unknown IDs are ignored.

        Args:
            handoff_id: ID of the handoff.
            now: Current time.monotonic(), in seconds.
            by_main: Whether the main process gives it up. Otherwise an engine process does, and
                the main process is told that the send failed.
        """
        send = self._table.sends.get(handoff_id)
        if send is None:
            return self._table.take_effects()
        if send.state not in OVER and by_main:
            self._table.end(send, _S.ABORTED, now, "aborted", farewell=True)
        elif send.state not in OVER:
            reason, detail = pb.REFUSAL_REASON_CANCELLED, "the engine gave it up"
            self._table.fail(send, reason, detail, now, farewell=True)
        send.deadline = min(send.deadline, now + self._table.linger_s(send))
        return self._table.take_effects()

    def handle_reply(self, reply: pb.HandoffReply, handoff_id: bytes, now: float) -> list[Effect]:
        """Applies a reply of a send's receiver.

        Replies to older epochs are ignored.
        """
        send = self._table.sends.get(handoff_id)
        if send is None or send.state in OVER:
            return self._table.take_effects()
        if reply.kind == pb.HandoffReply.KIND_REFUSED and reply.epoch in (0, send.epoch):
            # A reason of a later version is a number that this one has no name for.
            reason = reply.reason if reply.reason > 0 else pb.REFUSAL_REASON_UNSPECIFIED
            detail = shortened(f"{send.target}: {reply.detail}")
            self._table.statistics.refusals[reason] += 1
            if send.transport and reason in _WORTH_ANOTHER:
                self._table.fall_back(send, reason, detail, now)
            else:
                self._table.fail(send, reason, detail, now)
        elif reply.kind == pb.HandoffReply.KIND_COMMITTED:
            if reply.epoch == send.epoch and send.state is _S.COMMITTING:
                self._table.end(send, _S.COMMITTED, now, "")
        elif reply.kind == pb.HandoffReply.KIND_OPENED:
            # A receiver that replies before the open has left is broken; its reply is ignored.
            is_asked = send.state is _S.OPENING and not send.open_due
            if is_asked and reply.epoch == send.epoch:
                self._opened(send, reply.transport, now)
        return self._table.take_effects()

    def handle_stream_lost(self, handoff_id: bytes, detail: str, now: float) -> list[Effect]:
        """Fails a send whose stream has ended before the commit."""
        send = self._table.sends.get(handoff_id)
        if send is not None and send.state not in OVER:
            reason, detail = pb.REFUSAL_REASON_UNSPECIFIED, f"{send.target}: {detail}"
            self._table.fail(send, reason, detail, now)
        return self._table.take_effects()

    def next_batch(
        self, handoff_id: bytes, max_bytes: int, now: float
    ) -> Sequence[OutgoingFrame] | None:
        """Returns the next frames to send, about max_bytes of blocks; None: wait for a Wake.

        The caller reads the payloads before anything else can happen.

        Raises:
            TransferRefused: No transport can carry the handoff to its target.
        """
        send = self._table.sends.get(handoff_id)
        if send is None or send.state in OVER or send.extent is None:
            return None
        if send.open_due:
            send.open_due = False
            send.offers = self._transports.offers(send.target, send.tried)
            if not send.offers:
                raise TransferRefused("no transport can be used")
            frame = send_frames.open_frame(send, self._known_layout(), now)
            return [frame]
        batch, room = list[OutgoingFrame](), max_bytes
        while send.state is _S.SENDING and send.num_sent < len(send.filled) and room > 0:
            filled = send.filled[send.num_sent]
            send.num_sent += 1
            frame = self._frame(send, filled, send.extent)
            batch.append(frame)
            num_bytes = filled.num_blocks and (
                filled.num_blocks * self._known_layout().group_of(filled.layer).block_bytes
            )
            room -= frames.HEADER_BYTES
            room -= num_bytes if frame.payload else num_bytes // _BYTES_BY_REFERENCE
            if send.num_commits == len(send.totals):
                self._table.advance(send, _S.COMMITTING)
        if not batch:
            return None
        send.deadline = now + self._limits.idle_timeout_s
        return batch

    def handle_written(self, handoff_id: bytes, now: float) -> None:
        """Extends the deadline of a send: the transport has taken a batch."""
        send = self._table.sends.get(handoff_id)
        if send is not None and send.state in (_S.SENDING, _S.COMMITTING):
            send.deadline = now + self._limits.idle_timeout_s

    def offered(self, handoff_id: bytes) -> Container[str]:
        """Returns the names of the transports that a send's last open offered."""
        send = self._table.sends.get(handoff_id)
        return [offer.name for offer in send.offers] if send is not None else ()

    def expire(self, now: float) -> list[Effect]:
        """Ends every send whose state has lasted too long, and frees extents kept for writers."""
        self._table.expire(now)
        return self._table.take_effects()

    def next_deadline(self) -> float | None:
        """Returns the earliest time at which `expire` may have something to do."""
        return self._table.next_deadline()

    def begin_erasing(self) -> None:
        """Begins to overwrite the bytes of earlier handoffs in this half of staging."""
        self._table.queue.eraser.begin()

    def erase(self) -> None:
        """Overwrites some of these bytes."""
        self._table.queue.eraser.step(self._memory)

    @property
    def must_erase(self) -> bool:
        """Whether `erase` has something to do."""
        return self._table.queue.eraser.has_work

    def arena_statistics(self) -> ArenaStatistics:
        """Returns the usage of the sending half of staging."""
        return self._table.queue.statistics()

    @property
    def statistics(self) -> SenderStatistics:
        """Counts since the service started."""
        return self._table.statistics

    @property
    def num_live(self) -> int:
        """Number of sends that are not over."""
        return sum(send.state not in OVER for send in self._table.sends.values())

    @property
    def num_waiting(self) -> int:
        """Number of sends that wait for staging."""
        return len(self._table.queue)

    def check_integrity(self) -> None:
        """Raises AssertionError unless exactly the known sends hold extents and queue places."""
        self._table.check_integrity()

    def _opened(self, send: Send, transport: str, now: float) -> None:
        offered = {offer.name for offer in send.offers}
        transport = transport or UNNAMED_TRANSPORT
        if transport not in offered:
            detail = f"{send.target} chose {shortened(transport)!r}, which was not offered"
            self._table.fail(send, pb.REFUSAL_REASON_MALFORMED, detail, now, farewell=True)
            return
        send.transport = transport
        send.receiver_opened_at = now
        send.deadline = now + self._limits.idle_timeout_s
        self._table.advance(send, _S.SENDING)
        self._table.add_effect(Wake(send.handoff_id))

    def _frame(self, send: Send, filled: FilledRun, extent: Extent) -> OutgoingFrame:
        if not filled.num_blocks:
            send.num_commits += 1
            return send_frames.commit_frame(send, filled.shard)
        blocks = send_frames.outgoing_blocks(
            send, filled, extent, self._known_layout(), self._memory
        )
        send.num_frames += 1
        self._table.statistics.num_bytes[send.transport] += len(blocks.payload)
        self._table.statistics.num_frames[send.transport] += 1
        return self._transports.frame(send.transport, blocks)

    def _known_layout(self) -> KvLayout:
        if self._layout is None:
            raise TransferRefused("the transfer service is not configured yet")
        return self._layout


def _check_num_tokens(num_tokens: int, num_blocks: int, layout: KvLayout) -> None:
    most = num_blocks * layout.counted_tokens
    if not 1 <= num_tokens <= most:
        raise TransferRefused(
            f"num_tokens is {num_tokens}; must be 1 to {most} for {num_blocks} blocks"
        )
