"""A simulated worker that sends: its engine, its main process and its transfer service."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.service import send_state
from baton.kvtransfer.service.send_state import SenderLimits
from baton.kvtransfer.service.sender import Sender
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_streams import Socket, Stream, truth
from tests.kvtransfer.simulated_transports import simulated

if TYPE_CHECKING:
    from tests.kvtransfer.simulated_decode import Decode
    from tests.kvtransfer.simulated_network import World

SENDER_LIMITS = SenderLimits(
    max_wait_s=4, idle_timeout_s=5, reply_grace_s=1, linger_s=0.5, writer_timeout_s=60, max_sends=16
)
SEND_BLOCKS = 4


@dataclass
class Send:
    """One handoff, as the sending worker's engine sees it.

    Attributes:
        progress: Number of `runs` that each shard has filled.
        ended: How the send ended, as the main process was told.
        writing: Whether the engine may write to its staging.
        wanted: Whether it must arrive in a calm world.
    """

    handoff_id: bytes
    source: Prefill
    target: Decode
    num_blocks: int
    progress: list[int]
    wanted: bool = True
    offset: int | None = None
    writing: bool = False
    aborted: bool = False
    ended: list[send_state.Ended | send_state.NotReserved] = field(default_factory=list)
    ended_at: float = 0.0

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Runs (layer, first block, blocks) in the order of a prefill in two chunks."""
        half = self.num_blocks // 2
        chunks = [(0, half), (half, self.num_blocks - half)]
        return [(layer, *chunk) for chunk in chunks if chunk[1] for layer in range(2)]

    @property
    def is_filled(self) -> bool:
        return all(done == len(self.runs) for done in self.progress)


class Prefill:
    """A worker that sends. World.restart replaces it by a new one.

    Its main process, its scheduler and each shard have sockets of their own to its service.
    """

    def __init__(self, world: World, transports: list[str]) -> None:
        self.world, self.transports = world, transports
        self._main, self._told, self._scheduler = Socket(world), Socket(world), Socket(world)
        self._shards = [Socket(world) for _ in range(world.layout.num_shards)]
        layout = world.layout
        self.memory = memoryview(bytearray(layout.handoff_bytes(SEND_BLOCKS)))
        self.segment = f"segment-{world.number()}"
        world.segments[self.segment] = self.memory
        arena = Arena(0, len(self.memory))
        self.negotiator = simulated(world, self, transports, self.segment)
        self.sender = Sender(arena, self.memory, SENDER_LIMITS, self.negotiator)
        self.sender.configure(layout)
        self.sends: dict[bytes, Send] = {}
        self.streams: dict[bytes, Stream] = {}
        self.alive = True

    # ---- The worker's main process and its engine.

    def open(self, handoff_id: bytes, target: Decode, num_blocks: int, wait_s: float):
        """Begins a handoff; returns None when it is refused at once."""
        tokens = num_blocks * self.world.layout.block_size_tokens
        send = Send(handoff_id, self, target, num_blocks, [0] * self.world.layout.num_shards)
        try:
            effects = self.sender.open(
                handoff_id, target.address, num_blocks, tokens, wait_s, self.world.now
            )
        except TransferRefused:
            return None
        self.sends[handoff_id] = send
        self.carry_out(effects)
        return send

    def shrink(self, send: Send, num_blocks: int) -> None:
        """Makes a handoff smaller whose engine lacks blocks and has filled nothing."""
        if not send.writing or any(send.progress) or num_blocks > send.num_blocks:
            return
        tokens = num_blocks * self.world.layout.block_size_tokens
        try:
            offset, effects = self.sender.shrink(
                send.handoff_id, num_blocks, tokens, self.world.now
            )
        except TransferRefused:
            assert send.ended or self.sends.get(send.handoff_id) is not send
            return
        assert offset == send.offset
        send.num_blocks = num_blocks
        self.carry_out(effects)

    def fill(self, send: Send, shard: int, count: int = 1, *, last_apart: bool = False) -> None:
        """Writes the next runs of blocks of a shard and reports them."""
        for _ in range(count):
            if not send.writing or send.progress[shard] == len(send.runs):
                return
            layer, first, blocks = send.runs[send.progress[shard]]
            begin, data = self._run(send, shard, layer, first, blocks)
            assert send.offset is not None
            self.memory[send.offset + begin : send.offset + begin + len(data)] = data
            send.progress[shard] += 1
            last = send.progress[shard] == len(send.runs)
            filled = pb.LocalFrame(
                handoff_id=send.handoff_id, shard=shard, layer=layer,
                first_block=first, num_blocks=blocks, checksum=frames.checksum(data),
                last=last and not last_apart,
            )  # fmt: skip
            self._tell_filled(shard, filled)
            if last and last_apart:
                self._tell_last(send, shard)
            self._settle_writer(send)

    def fill_all(self, send: Send) -> None:
        for shard in range(len(send.progress)):
            self.fill(send, shard, len(send.runs))

    def abort(self, send: Send) -> None:
        """Aborts from the main process, after the engine has stopped writing."""
        if self.alive:
            send.writing, send.aborted = False, True
            self._abort(self._main, send, by_main=True)

    def give_up(self, send: Send) -> None:
        """Aborts from the engine: its scheduler, and each shard once it has stopped writing."""
        if not send.writing or any(done == len(send.runs) for done in send.progress):
            return
        self._abort(self._scheduler, send, by_main=False)
        self._stop_writing(send)

    def _stop_writing(self, send: Send) -> None:
        send.writing = False
        for shard, socket in enumerate(self._shards):
            self._abort(socket, send, by_main=False)
            self._tell_last(send, shard)

    def _abort(self, socket: Socket, send: Send, *, by_main: bool) -> None:
        socket.post(
            lambda: self.carry_out(
                self.sender.abort(send.handoff_id, self.world.now, by_main=by_main)
            )
        )

    def _tell_filled(self, shard: int, filled: pb.LocalFrame) -> None:
        self._shards[shard].post(lambda: self.carry_out(self.sender.fill(filled, self.world.now)))

    def _tell_last(self, send: Send, shard: int) -> None:
        last = pb.LocalFrame(handoff_id=send.handoff_id, shard=shard, last=True)
        self._tell_filled(shard, last)

    def close_sockets(self) -> None:
        """Its processes are dead."""
        for socket in (self._main, self._told, self._scheduler, *self._shards):
            socket.close()

    def check(self) -> None:
        """Checks that staging holds what the engine wrote, while the engine may write there."""
        self.sender.check_integrity()
        for send in self.sends.values():
            if not send.writing:
                continue
            assert send.offset is not None
            for shard, done in enumerate(send.progress):
                for run in send.runs[:done]:
                    begin, data = self._run(send, shard, *run)
                    begin += send.offset
                    assert self.memory[begin : begin + len(data)] == data, (send, shard, run)

    def _run(
        self, send: Send, shard: int, layer: int, first: int, blocks: int
    ) -> tuple[int, bytes]:
        layout = self.world.layout
        begin = layout.offset(shard, layer, first, send.num_blocks)
        whole = truth(send.handoff_id, layout.handoff_bytes(send.num_blocks))
        return begin, whole[begin : begin + blocks * layout.block_bytes]

    def _settle_writer(self, send: Send) -> None:
        """Ends the writing of a failed send that is filled: its staging may be freed now."""
        if send.ended and send.is_filled:
            send.writing = False

    # ---- Its transfer service.

    def write(self, stream: Stream) -> None:
        """Sends one batch."""
        if not stream.awake:
            return
        handoff_id = stream.attempt.handoff_id
        try:
            batch = self.sender.next_batch(handoff_id, self.world.batch_bytes, self.world.now)
        except TransferRefused:
            stream.cut()
            return
        if batch is None:
            stream.awake = False
            return
        stream.send(batch)
        self.sender.handle_written(handoff_id, self.world.now)

    def take(self, stream: Stream, reply: pb.HandoffReply) -> None:
        effects = self.sender.handle_reply(reply, stream.attempt.handoff_id, self.world.now)
        self.carry_out(effects)

    def lose(self, stream: Stream) -> None:
        """Tells the sender that the stream has ended."""
        handoff_id = stream.attempt.handoff_id
        stream.sender_over, stream.awake = True, False
        if self.streams.get(handoff_id) is stream:
            self.carry_out(self.sender.handle_stream_lost(handoff_id, "lost", self.world.now))

    def carry_out(self, effects: Iterable[send_state.Effect]) -> None:
        for effect in effects:
            send, stream = self.sends[effect.handoff_id], self.streams.get(effect.handoff_id)
            match effect:
                case send_state.Reserved(_, offset):
                    self._told.post(functools.partial(self._begin_writing, send, offset))
                case send_state.StartStream():
                    assert stream is None
                    stream = Stream(self.world.number(), send)
                    self.streams[send.handoff_id] = stream
                    self.world.streams.append(stream)
                    if not send.target.alive:
                        stream.cut()
                        stream.receiver_over = True
                case send_state.Wake():
                    if stream is not None and not stream.is_cut:
                        stream.awake = True
                case send_state.StopStream(_, farewell):
                    if stream is not None:
                        del self.streams[send.handoff_id]
                        if not stream.is_cut:
                            stream.up += [farewell, None] if farewell else [None]
                        stream.sender_over, stream.awake = True, False
                case send_state.NotReserved() | send_state.Ended():
                    assert not send.ended, (send, effect)
                    send.ended.append(effect)
                    send.ended_at = self.world.now
                    self._settle_writer(send)
                    if isinstance(effect, send_state.Ended) and effect.committed:
                        assert (send.handoff_id, effect.epoch) in self.world.committed

    @staticmethod
    def _begin_writing(send: Send, offset: int) -> None:
        """The main process gets the staging and gives the request to the engine."""
        assert send.offset is None
        send.offset, send.writing = offset, not send.aborted

    def expire(self) -> None:
        for send in self.sends.values():
            # No request runs longer than this.
            if send.ended and self.world.now >= send.ended_at + SENDER_LIMITS.writer_timeout_s:
                send.writing = False
        self.carry_out(self.sender.expire(self.world.now))
