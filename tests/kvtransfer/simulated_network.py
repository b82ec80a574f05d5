"""Prefill and decode workers on a network that loses, repeats, reorders and alters what it carries.

The state machines are the real ones. What the transfer service does around them (a process for each
worker, tasks for each push) is done here in single steps, in whatever order a test chooses. Time is
a number, too.
"""

from __future__ import annotations

import functools
import random
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field

from baton.kvtransfer import frames, receiving, sending
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.receiving import Choice, Grant, ReceiverLimits, ReceiveState
from baton.kvtransfer.sending import Outgoing, SenderLimits
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.sender import Sender
from baton.v1 import kv_transfer_pb2 as pb

SENDER_LIMITS = SenderLimits(
    max_wait_s=4, idle_timeout_s=5, reply_grace_s=1, linger_s=0.5, writer_timeout_s=60, max_sends=16
)
RECEIVER_LIMITS = ReceiverLimits(
    max_wait_s=4, idle_timeout_s=3, commit_ttl_s=6, claim_timeout_s=2, retry_timeout_s=2,
    max_queued=64, max_tombstones=256,
)  # fmt: skip
SEND_BLOCKS, RECEIVE_BLOCKS = 4, 3
# One more than there are, which is refused.
_MOST_RANKS = 3
# Epochs of a handoff's second attempt begin here, above any that its first one reaches.
SECOND_ATTEMPT = 1000

FrameKey = tuple[int, receiving.ReceivedFrame]
"""An epoch, and a frame of it."""


@functools.lru_cache(1024)
def truth(handoff_id: bytes, writer_epoch: int, num_bytes: int) -> bytes:
    """What a prompt's KV cache is when it is computed for the writer_epoch-th time."""
    return random.Random(f"{handoff_id.hex()} {writer_epoch}").randbytes(num_bytes)


def joined(batch: Sequence[Outgoing] | bytes) -> bytes:
    """A batch's bytes as staging is now."""
    if isinstance(batch, bytes):
        return batch
    return b"".join(part for out in batch for part in (out.header, out.payload))


@dataclass
class Send:
    """One attempt to hand over, as the sending worker's engine sees it.

    Attributes:
        epochs: that each rank writes.
        progress: of each rank, in `runs`.
        ended: how, as the main process was told.
        writing: the engine may write to its staging.
        wanted: it must arrive, in a calm world.
    """

    handoff_id: bytes
    source: Prefill
    target: Decode
    num_blocks: int
    epochs: list[int]
    progress: list[int]
    wanted: bool = True
    offset: int | None = None
    writing: bool = False
    aborted: bool = False
    ended: list[sending.Ended | sending.NotReserved] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def epoch(self) -> int:
        """The newest that a rank writes."""
        return max(self.epochs)

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(layer, first block, blocks) in the order of a prefill in two chunks."""
        half = self.num_blocks // 2
        chunks = [(0, half), (half, self.num_blocks - half)]
        return [(layer, *chunk) for chunk in chunks if chunk[1] for layer in range(2)]

    @property
    def is_filled(self) -> bool:
        return all(done == len(self.runs) for done in self.progress)


class Stream:
    """One push. None in a queue is the end of that direction.

    Attributes:
        awake: the sender may have a batch for it.
        is_cut: what is written goes nowhere.
        ending: the receiver throws away what still comes.
    """

    def __init__(self, number: int, send: Send) -> None:
        self.number, self.send = number, send
        self.source, self.target = send.source, send.target
        self.up: deque[bytes | None] = deque()
        self.down: deque[pb.PushReply | None] = deque()
        self.awake = True
        self.is_cut = self.ending = self.sender_over = self.receiver_over = False

    def cut(self, keep_up: int = 0, keep_down: int = 0) -> None:
        """Ends it both ways, after the first so many of what is on its way."""
        self.up = deque([*self.up][:keep_up] + [None])
        self.down = deque([*self.down][:keep_down] + [None])
        self.is_cut, self.awake = True, False


class Link:
    """One pair's process group. Bytes on it are read from the sender's staging as they arrive."""

    def __init__(self, link_id: str, source: Prefill, target: Decode) -> None:
        self.link_id, self.source, self.target = link_id, source, target
        # Those that a test has altered are bytes.
        self.queue: deque[Sequence[Outgoing] | bytes] = deque()
        # Who has not heard of its loss yet.
        self.untold: list[Prefill | Decode] = []
        self.is_lost = False

    def lose(self, keep: int = 0) -> None:
        if not self.is_lost:
            self.queue = deque([*self.queue][:keep])
            self.is_lost, self.untold = True, [self.source, self.target]


class Socket:
    """One direction of a process's connection to the service beside it: kept in order, and slow.

    Several of one worker's overtake each other. In a world of quick sockets all arrives at once.
    """

    def __init__(self, world: World) -> None:
        self._is_quick = world.has_quick_sockets
        self._queue: deque[Callable[[], None]] = deque()
        world.sockets.append(self)

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, deliver: Callable[[], None]) -> None:
        """Something is said."""
        if self._is_quick:
            deliver()
        else:
            self._queue.append(deliver)

    def deliver(self) -> None:
        """The first of what is on its way arrives."""
        if self._queue:
            self._queue.popleft()()

    def close(self) -> None:
        """Its worker has died."""
        self._queue.clear()


class Prefill:
    """A worker that sends; `replace` it by a new one when it restarts.

    Its main process, its scheduler and each rank speak to its service by sockets of their own.
    """

    def __init__(self, world: World, transports: list[str]) -> None:
        self.world, self.transports = world, transports
        self._main, self._told, self._scheduler = Socket(world), Socket(world), Socket(world)
        self._ranks = [Socket(world) for _ in range(world.layout.num_shards)]
        layout = world.layout
        self.memory = memoryview(bytearray(layout.handoff_bytes(SEND_BLOCKS)))
        self.segment = f"segment-{world.number()}"
        world.segments[self.segment] = self.memory
        arena = Arena(0, len(self.memory))
        self.sender = Sender(arena, self.memory, SENDER_LIMITS, self._offers)
        self.sender.configure(layout)
        self.sends: dict[bytes, Send] = {}
        self.streams: dict[bytes, Stream] = {}
        self.alive = True

    # ---- The worker's main process and its engine.

    def open(self, handoff_id: bytes, target: Decode, num_blocks: int, wait_s: float, epoch=1):
        """Begins a handoff; None when it is refused at once."""
        tokens = num_blocks * self.world.layout.block_size_tokens
        ranks = range(self.world.layout.num_shards)
        send = Send(
            handoff_id, self, target, num_blocks, [epoch for _ in ranks], [0 for _ in ranks]
        )
        try:
            effects = self.sender.open(
                handoff_id, target.address, num_blocks, tokens, wait_s, epoch, self.world.now
            )
        except TransferRefused:
            return None
        self.sends[handoff_id] = send
        self.carry_out(effects)
        return send

    def fill(self, send: Send, rank: int, count: int = 1, *, last_apart: bool = False) -> None:
        """The engine writes its next runs of blocks and tells of them."""
        for _ in range(count):
            if not send.writing or send.progress[rank] == len(send.runs):
                return
            layer, first, blocks = send.runs[send.progress[rank]]
            begin, data = self._run(send, rank, layer, first, blocks)
            assert send.offset is not None
            self.memory[send.offset + begin : send.offset + begin + len(data)] = data
            send.progress[rank] += 1
            last = send.progress[rank] == len(send.runs)
            filled = pb.LocalFrame(
                handoff_id=send.handoff_id, epoch=send.epochs[rank], rank=rank, layer=layer,
                first_block=first, num_blocks=blocks, checksum=frames.checksum(data),
                last=last and not last_apart,
            )  # fmt: skip
            self._tell_filled(rank, filled)
            if last and last_apart:
                self._tell_last(send, rank, send.epochs[rank])
            self._settle_writer(send)

    def fill_all(self, send: Send) -> None:
        for rank in range(len(send.progress)):
            self.fill(send, rank, len(send.runs))

    def fill_late(self, send: Send) -> None:
        """Of an epoch that another rank knows to be over: ignored."""
        if not self._has(send) or not self.world.has_quick_sockets:
            return
        late = pb.LocalFrame(handoff_id=send.handoff_id, epoch=send.epoch - 1, num_blocks=1)
        assert self.sender.fill(late, self.world.now) == []

    def restart_writer(self, send: Send) -> None:
        """The prefill was preempted: each rank starts over once the service has voided the rest."""
        if send.writing:
            epoch = send.epoch + 1
            for rank, socket in enumerate(self._ranks):
                socket.post(functools.partial(self._restart_rank, send, rank, epoch))

    def _restart_rank(self, send: Send, rank: int, epoch: int) -> None:
        if not send.writing or send.epochs[rank] >= epoch:
            return
        try:
            effects = self.sender.restart(send.handoff_id, epoch, self.world.now)
        except TransferRefused:
            self._stop_writing(send)
            return
        send.epochs[rank], send.progress[rank] = epoch, 0
        self.carry_out(effects)

    def abort(self, send: Send) -> None:
        """By the main process, once the engine has stopped writing."""
        if self._has(send):
            send.writing, send.aborted = False, True
            self._abort(self._main, send, is_known=True)

    def give_up(self, send: Send) -> None:
        """By the engine: its scheduler says so, and each rank once it writes no more."""
        if not send.writing or any(done == len(send.runs) for done in send.progress):
            return
        self._abort(self._scheduler, send, is_known=False)
        self._stop_writing(send)

    def _stop_writing(self, send: Send) -> None:
        send.writing = False
        for rank, socket in enumerate(self._ranks):
            self._abort(socket, send, is_known=False)
            self._tell_last(send, rank, send.epoch)

    def _abort(self, socket: Socket, send: Send, *, is_known: bool) -> None:
        socket.post(
            lambda: self.carry_out(
                self.sender.abort(send.handoff_id, self.world.now, is_known=is_known)
            )
        )

    def _tell_filled(self, rank: int, filled: pb.LocalFrame) -> None:
        self._ranks[rank].post(lambda: self.carry_out(self.sender.fill(filled, self.world.now)))

    def _tell_last(self, send: Send, rank: int, epoch: int) -> None:
        last = pb.LocalFrame(handoff_id=send.handoff_id, epoch=epoch, rank=rank, last=True)
        self._tell_filled(rank, last)

    def close_sockets(self) -> None:
        """Its processes are dead."""
        for socket in (self._main, self._told, self._scheduler, *self._ranks):
            socket.close()

    def check(self) -> None:
        """Nothing but the engine changes what it wrote, as long as it may write there."""
        self.sender.check_integrity()
        for send in self.sends.values():
            if not send.writing:
                continue
            assert send.offset is not None
            for rank, done in enumerate(send.progress):
                for run in send.runs[:done]:
                    begin, data = self._run(send, rank, *run)
                    begin += send.offset
                    assert self.memory[begin : begin + len(data)] == data, (send, rank, run)

    def _has(self, send: Send) -> bool:
        """Whether the engine has not died with its worker, nor handed over the same again."""
        return self.alive and self.sends[send.handoff_id] is send

    def _run(self, send: Send, rank: int, layer: int, first: int, blocks: int) -> tuple[int, bytes]:
        layout = self.world.layout
        begin = layout.offset(rank, layer, first, send.num_blocks)
        whole = truth(send.handoff_id, send.epochs[rank], layout.handoff_bytes(send.num_blocks))
        return begin, whole[begin : begin + blocks * layout.block_bytes]

    def _settle_writer(self, send: Send) -> None:
        """One that failed and has no more to write is forgotten: its staging is free."""
        if send.ended and send.is_filled:
            send.writing = False

    # ---- Its transfer service.

    def write(self, stream: Stream) -> None:
        """One batch leaves."""
        if not stream.awake:
            return
        handoff_id = stream.send.handoff_id
        try:
            batch = self.sender.next_batch(handoff_id, self.world.batch_bytes, self.world.now)
        except TransferRefused:
            stream.cut()
            return
        if batch is None:
            stream.awake = False
            return
        # Everything that leaves under one epoch is of one writer's epoch.
        voided_before = self.sender._sends[handoff_id].writer_epoch
        writer = self.world.writers.setdefault((handoff_id, batch.epoch), voided_before)
        assert writer == voided_before, (stream.send, batch.epoch, writer)
        if not batch.link_id:
            if not stream.is_cut:
                stream.up.append(joined(batch.frames))
            self.sender.handle_written(handoff_id, self.world.now)
        elif (link := self.world.links[batch.link_id]).is_lost:
            self.carry_out(self.sender.handle_link_lost(link.link_id, "lost", self.world.now))
        else:
            link.queue.append(batch.frames)
            self.sender.handle_written(handoff_id, self.world.now)

    def take(self, stream: Stream, reply: pb.PushReply) -> None:
        effects = self.sender.handle_reply(reply, stream.send.handoff_id, self.world.now)
        self.carry_out(effects)

    def lose(self, stream: Stream) -> None:
        """The call is over."""
        handoff_id = stream.send.handoff_id
        stream.sender_over, stream.awake = True, False
        if self.streams.get(handoff_id) is stream:
            self.carry_out(self.sender.handle_push_lost(handoff_id, "lost", self.world.now))

    def carry_out(self, effects: Iterable[sending.Effect]) -> None:
        for effect in effects:
            send, stream = self.sends[effect.handoff_id], self.streams.get(effect.handoff_id)
            match effect:
                case sending.Reserved(_, offset):
                    self._told.post(functools.partial(self._begin_writing, send, offset))
                case sending.StartPush():
                    assert stream is None
                    stream = Stream(self.world.number(), send)
                    self.streams[send.handoff_id] = stream
                    self.world.streams.append(stream)
                    if not send.target.alive:
                        stream.cut()
                        stream.receiver_over = True
                case sending.Wake():
                    if stream is not None and not stream.is_cut:
                        stream.awake = True
                case sending.StopPush(_, farewell):
                    if stream is not None:
                        del self.streams[send.handoff_id]
                        if not stream.is_cut:
                            stream.up += [farewell, None] if farewell else [None]
                        stream.sender_over, stream.awake = True, False
                case sending.NotReserved() | sending.Ended():
                    assert not send.ended, (send, effect)
                    send.ended.append(effect)
                    send.ended_at = self.world.now
                    self._settle_writer(send)
                    if isinstance(effect, sending.Ended) and effect.committed:
                        assert (send.handoff_id, effect.epoch) in self.world.committed

    @staticmethod
    def _begin_writing(send: Send, offset: int) -> None:
        """Its main process hears that there is staging, and gives the request to the engine."""
        assert send.offset is None
        send.offset, send.writing = offset, not send.aborted

    def expire(self) -> None:
        for send in self.sends.values():
            # No request is at work for longer.
            if send.ended and self.world.now >= send.ended_at + SENDER_LIMITS.writer_timeout_s:
                send.writing = False
        self.carry_out(self.sender.expire(self.world.now))

    def _offers(self, target: str, tried: Container[str]) -> list[pb.TransportOffer]:
        offers = []
        for name in self.transports:
            if name not in tried:
                offer = pb.TransportOffer(name=name, shm_segment=self.segment)
                if name == "link":
                    offer.link_id = self.world.link(self, self.world.addresses[target]).link_id
                offers.append(offer)
        return offers


class Decode:
    """A worker that receives."""

    def __init__(self, world: World, transports: list[str]) -> None:
        self.world, self.transports = world, transports
        self.address = f"decode-{world.number()}"
        world.addresses[self.address] = self
        self.memory = memoryview(bytearray(world.layout.handoff_bytes(RECEIVE_BLOCKS)))
        arena = Arena(0, len(self.memory))
        self.receiver = Receiver(arena, self.memory, RECEIVER_LIMITS, self._choose)
        self.receiver.configure(world.layout)
        self.states: dict[bytes, ReceiveState] = {}
        # Claims that are not released: (grant, rank).
        self.grants: list[tuple[Grant, int]] = []
        self.loaded: Counter[bytes] = Counter()
        # By handoff and rank: frames that were copied as they came, and verified.
        self.early: dict[tuple[bytes, int], dict[FrameKey, bytes]] = {}
        self._done: set[tuple[bytes, int]] = set()
        self._main, self._scheduler, self._news = Socket(world), Socket(world), Socket(world)
        self._ranks = [Socket(world) for _ in range(_MOST_RANKS)]
        self._answers = [Socket(world) for _ in range(_MOST_RANKS)]
        # What its scheduler has not read: the latest of each handoff.
        self._unread: dict[bytes, receiving.Changed] = {}
        self.attached: dict[int, str] = {}
        self.alive = True

    # ---- The worker's engine.

    def claim(self, handoff_id: bytes, rank: int) -> None:
        self._ranks[rank].post(lambda: self._claim(handoff_id, rank))

    def _claim(self, handoff_id: bytes, rank: int) -> None:
        try:
            grant, effects = self.receiver.claim(handoff_id, rank, self.world.now)
        except TransferRefused:
            return
        self.carry_out(effects)
        self._answers[rank].post(lambda: self._granted(grant, rank))

    def _granted(self, grant: Grant, rank: int) -> None:
        """A rank may load its part, once."""
        is_new = (grant, rank) not in self.grants and (grant.handoff_id, rank) not in self._done
        if is_new:
            self.grants.append((grant, rank))

    def claim_ahead(self, handoff_id: bytes) -> None:
        self._scheduler.post(
            lambda: self.carry_out(self.receiver.claim_ahead(handoff_id, self.world.now))
        )

    def peek(self, handoff_id: bytes, rank: int) -> None:
        """A rank copies what has come, before anything says that it is right."""

        def look() -> None:
            try:
                grant = self.receiver.peek(handoff_id, rank, 0, 0)
            except TransferRefused:
                return
            self._answers[rank].post(lambda: self._load_early(grant, rank))

        self._ranks[rank].post(look)

    def _load_early(self, grant: Grant, rank: int) -> None:
        part, expected = self._part(grant), self._expected(grant, rank)
        copied = self.early.setdefault((grant.handoff_id, rank), {})
        for frame in grant.frames:
            at = self._place(grant, frame)
            if frames.checksum(part[at]) == frame.checksum:
                assert part[at] == expected[at], (grant, frame)
                copied[grant.epoch, frame] = part[at]

    def load(self, grant: Grant, rank: int) -> None:
        """Copies a claimed rank's part; what verifies is true, however late it is copied."""
        self.grants.remove((grant, rank))
        part, expected = self._part(grant), self._expected(grant, rank)
        copied, early = b"", self.early.get((grant.handoff_id, rank), {})
        for frame in grant.frames:
            at = self._place(grant, frame)
            assert at.start == len(copied)
            data = early.get((grant.epoch, frame), part[at])
            if frames.checksum(data) != frame.checksum:
                # Too late: it has expired, or was released by another.
                assert self.states[grant.handoff_id] is not ReceiveState.CLAIMED
                return
            copied += data
        assert copied == expected
        self.loaded[grant.handoff_id] += 1
        self._done.add((grant.handoff_id, rank))
        self.release(grant.handoff_id, rank)

    def release(self, handoff_id: bytes, rank: int, *, all_ranks: bool = False) -> None:
        """By a rank, or by the scheduler for all of them."""
        socket = self._scheduler if all_ranks else self._ranks[rank]
        socket.post(
            lambda: self.carry_out(
                self.receiver.release(handoff_id, rank, self.world.now, all_ranks=all_ranks)
            )
        )

    def drop(self, handoff_id: bytes) -> None:
        """By the main process."""
        self._main.post(lambda: self.carry_out(self.receiver.drop(handoff_id, self.world.now)))

    def close_sockets(self) -> None:
        """Its processes are dead."""
        for socket in (self._main, self._scheduler, self._news, *self._ranks, *self._answers):
            socket.close()

    def load_all(self) -> bool:
        """Every rank loads what is committed; whether there was anything."""
        for handoff_id, state in list(self.states.items()):
            if state in (ReceiveState.COMMITTED, ReceiveState.CLAIMED):
                for rank in range(self.world.layout.num_shards):
                    if (handoff_id, rank) not in self._done:
                        self.claim(handoff_id, rank)
        self.world.settle()
        grants = list(self.grants)
        for grant, rank in grants:
            self.load(grant, rank)
        return bool(grants)

    def check(self) -> None:
        """What somebody is loading does not change under them."""
        self.receiver.check_integrity()
        for grant, rank in self.grants:
            if self.states[grant.handoff_id] is ReceiveState.CLAIMED:
                assert self._part(grant) == self._expected(grant, rank), grant

    def _place(self, grant: Grant, frame: receiving.ReceivedFrame) -> slice:
        """Of a frame's bytes in its rank's part."""
        start = (frame.layer * grant.num_blocks + frame.first_block) * self._block_bytes
        return slice(start, start + frame.num_blocks * self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return self.world.layout.block_bytes

    def _part(self, grant: Grant) -> bytes:
        size = self.world.layout.shard_bytes(grant.num_blocks)
        return bytes(self.memory[grant.offset : grant.offset + size])

    def _expected(self, grant: Grant, rank: int) -> bytes:
        """The bytes of the writer's epoch that went out under the grant's epoch."""
        layout = self.world.layout
        writer_epoch = self.world.writers[grant.handoff_id, grant.epoch]
        whole = truth(grant.handoff_id, writer_epoch, layout.handoff_bytes(grant.num_blocks))
        size = layout.shard_bytes(grant.num_blocks)
        return whole[rank * size : (rank + 1) * size]

    # ---- Its transfer service.

    def take(self, stream: Stream, message: bytes) -> None:
        """One message of a push."""
        try:
            for frame in frames.decode(message):
                if frame.kind is FrameKind.REFERENCE:
                    frame = self._resolved(stream.number, frame)
                self.carry_out(self.receiver.handle_frame(stream.number, frame, self.world.now))
        except MalformedFrame as error:
            self.carry_out(self.receiver.handle_malformed(stream.number, error, self.world.now))
            self._end_unless_served(stream)

    def take_from(self, link: Link, batch: Sequence[Outgoing] | bytes) -> None:
        """One batch of a link; one that carries what is no frame is of no more use."""
        try:
            for frame in frames.decode(joined(batch)):
                self.carry_out(self.receiver.handle_link_frame(link.link_id, frame, self.world.now))
        except MalformedFrame:
            link.lose()

    def lose(self, stream: Stream) -> None:
        """The call is over."""
        stream.receiver_over = stream.ending = True
        self.attached.pop(stream.number, None)
        self.carry_out(self.receiver.handle_stream_lost(stream.number, self.world.now))
        stream.down.append(None)

    def carry_out(self, effects: Iterable[receiving.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, receiving.Changed):
                before = self.states.get(effect.handoff_id)
                assert before is None or effect.state in receiving.TRANSITIONS[before], effect
                self.states[effect.handoff_id] = effect.state
                self._unread.pop(effect.handoff_id, None)
                self._unread[effect.handoff_id] = effect
                self._news.post(self._read)
                if effect.state is ReceiveState.COMMITTED or effect.grants:
                    self.world.committed.add((effect.handoff_id, effect.epoch))
                continue
            stream = self.world.stream(effect.stream)
            if stream is None or stream.ending:
                continue
            stream.down.append(
                pb.PushReply(
                    kind=effect.kind, handoff_id=effect.handoff_id, epoch=effect.epoch,
                    reason=effect.reason, detail=effect.detail, transport=effect.transport,
                )
            )  # fmt: skip
            if effect.kind != pb.PushReply.KIND_OPENED:
                self._end_unless_served(stream)

    def _read(self) -> None:
        """Its scheduler reads what has changed, and ranks hear what they may load."""
        unread, self._unread = self._unread, {}
        for changed in unread.values():
            for rank, grant in enumerate(changed.grants):
                self._granted(grant, rank)

    def expire(self) -> None:
        self.carry_out(self.receiver.expire(self.world.now))

    def _end_unless_served(self, stream: Stream) -> None:
        if not stream.ending and not self.receiver.serves(stream.number):
            stream.ending = True
            stream.down.append(None)

    def _resolved(self, number: int, frame: frames.Frame) -> frames.Frame:
        if number not in self.attached:
            raise MalformedFrame("a reference on a stream that has not chosen shared memory")
        segment = self.world.segments[self.attached[number]]
        return frame.referenced(segment, frame.num_blocks * self._block_bytes)

    def _choose(self, number: int, opened: pb.PushOpen) -> Choice:
        self.attached.pop(number, None)
        for offer in opened.offers:
            if offer.name not in self.transports:
                continue
            if offer.name == "shm":
                self.attached[number] = offer.shm_segment
            elif offer.name == "link" and self.world.links[offer.link_id].is_lost:
                continue
            return Choice(offer.name, "", offer.link_id)
        raise MalformedFrame("none of the offered transports", pb.REFUSAL_REASON_TRANSPORT)


class World:
    """Some workers of each kind, and everything that is on its way between them.

    Attributes:
        has_quick_sockets: within a worker everything arrives at once.
        writers: whose bytes went out: the writer's epoch by (handoff id, epoch).
        committed: (handoff id, epoch) that a receiver has committed.
    """

    def __init__(
        self,
        num_shards: int,
        prefill_transports,
        decode_transports,
        batch_bytes: int,
        num_replicas: int = 1,
        *,
        has_quick_sockets: bool = True,
    ):
        self.layout = KvLayout(
            "m", "r", "float32", 2, 1, 8, 4, 128, "heads,tokens,content",
            tp_size=num_shards * num_replicas, num_replicas=num_replicas,
        )  # fmt: skip
        self.batch_bytes = batch_bytes
        self.now = 0.0
        self._numbers = 0
        self.has_quick_sockets = has_quick_sockets
        self.sockets: list[Socket] = []
        self.segments: dict[str, memoryview] = {}
        self.addresses: dict[str, Decode] = {}
        self.streams: list[Stream] = []
        self.links: dict[str, Link] = {}
        self.writers: dict[tuple[bytes, int], int] = {}
        self.committed: set[tuple[bytes, int]] = set()
        self.prefills = [Prefill(self, names) for names in prefill_transports]
        self.decodes = [Decode(self, names) for names in decode_transports]

    def number(self) -> int:
        """Never the same twice."""
        self._numbers += 1
        return self._numbers

    @property
    def nodes(self) -> list[Prefill | Decode]:
        return [*self.prefills, *self.decodes]

    def twin(self, node: Prefill | Decode) -> Prefill | Decode:
        """The other side of the same worker."""
        if isinstance(node, Prefill):
            return self.decodes[self.prefills.index(node)]
        return self.prefills[self.decodes.index(node)]

    @property
    def machines(self) -> list[Sender | Receiver]:
        return [each.sender for each in self.prefills] + [each.receiver for each in self.decodes]

    def stream(self, number: int) -> Stream | None:
        return next((each for each in self.streams if each.number == number), None)

    def link(self, source: Prefill, target: Decode) -> Link:
        """That joins the two; a new one when there is none."""
        for link in self.links.values():
            if (link.source, link.target, link.is_lost) == (source, target, False):
                return link
        link = Link(f"link-{self.number()}", source, target)
        self.links[link.link_id] = link
        return link

    # ---- What happens next.

    def steps(self) -> list[Callable[[], None]]:
        """Everything that may happen next without anybody's doing."""
        self.streams = [
            each
            for each in self.streams
            if each.up or each.down or not (each.sender_over and each.receiver_over)
        ]
        steps: list[Callable[[], None]] = []
        for stream in self.streams:
            if stream.awake:
                steps.append(functools.partial(stream.source.write, stream))
            if stream.up:
                steps.append(functools.partial(self._up, stream))
            if stream.down:
                steps.append(functools.partial(self._down, stream))
        for link in self.links.values():
            if link.queue:
                steps.append(functools.partial(self._along, link))
            elif link.untold:
                steps.append(functools.partial(self._tell_loss, link))
        steps += [socket.deliver for socket in self.sockets if socket]
        return steps

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(10_000):
            steps = self.steps()
            if not steps:
                return
            for step in steps:
                step()
        raise AssertionError("the workers talk for ever")

    def advance(self, to: float) -> None:
        """Time passes."""
        self.now = to
        for node in self.nodes:
            node.expire()

    def next_deadline(self) -> float | None:
        deadlines = (machine.next_deadline() for machine in self.machines)
        return min((each for each in deadlines if each is not None), default=None)

    def restart(self, old: Prefill | Decode, keep: int) -> None:
        """Killed, and another in its place: the other ends find out from what they share with it.

        Args:
            keep: messages of each stream that it had sent and that still arrive.
        """
        old.alive = False
        old.close_sockets()
        if isinstance(old, Prefill):
            self.prefills[self.prefills.index(old)] = Prefill(self, old.transports)
            for send in old.sends.values():
                send.writing = False
        else:
            self.decodes[self.decodes.index(old)] = Decode(self, old.transports)
        for stream in self.streams:
            if stream.source is old:
                stream.cut(keep_up=keep)
                stream.sender_over = True
            elif stream.target is old:
                stream.cut(keep_down=keep)
                stream.receiver_over = True
        for link in self.links.values():
            if old in (link.source, link.target):
                link.lose()

    def _up(self, stream: Stream) -> None:
        message, target = stream.up.popleft() if stream.up else None, stream.target
        if stream.receiver_over:
            return
        if message is None:
            target.lose(stream)
        elif not stream.ending:
            target.take(stream, message)

    def _down(self, stream: Stream) -> None:
        if not stream.down:
            return
        reply = stream.down.popleft()
        if reply is not None:
            if stream.source.alive:
                stream.source.take(stream, reply)
            return
        if stream.source.alive:
            stream.source.lose(stream)
        stream.up.clear()
        if not stream.receiver_over:
            stream.target.lose(stream)

    def _along(self, link: Link) -> None:
        if link.queue:
            batch = link.queue.popleft()
            if link.target.alive:
                link.target.take_from(link, batch)

    def _tell_loss(self, link: Link) -> None:
        if not link.untold:
            return
        node = link.untold.pop()
        if not node.alive:
            return
        machine = node.sender if isinstance(node, Prefill) else node.receiver
        node.carry_out(machine.handle_link_lost(link.link_id, "lost", self.now))
