"""A simulated worker that receives: its engine, its main process and its transfer service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import MalformedFrame, TransferRefused
from baton.kvtransfer.service import receive_state
from baton.kvtransfer.service.receive_state import Grant, ReceiverLimits, ReceiveState
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.transports.transport import Pull
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_streams import Socket, Stream, truth
from tests.kvtransfer.simulated_transports import SimulatedPuller, simulated

if TYPE_CHECKING:
    from tests.kvtransfer.simulated_network import World

RECEIVER_LIMITS = ReceiverLimits(
    max_wait_s=4, idle_timeout_s=3, commit_ttl_s=6, claim_timeout_s=2, retry_timeout_s=2,
    max_queued=64, max_tombstones=256,
)  # fmt: skip
RECEIVE_BLOCKS = 3
# One shard more than exist; its claims are refused.
_MOST_SHARDS = 3


class Decode:
    """A worker that receives."""

    def __init__(self, world: World, transports: list[str]) -> None:
        self.world, self.transports = world, transports
        self.address = f"decode-{world.number()}"
        world.addresses[self.address] = self
        self.memory = memoryview(bytearray(world.layout.handoff_bytes(RECEIVE_BLOCKS)))
        arena = Arena(0, len(self.memory))
        self.negotiator = simulated(world, self, transports)
        self.puller = SimulatedPuller(self.memory, self._pulled)
        self.receiver = Receiver(arena, self.memory, RECEIVER_LIMITS, self.negotiator.choose)
        self.receiver.configure(world.layout)
        self.states: dict[bytes, ReceiveState] = {}
        # Claims that are not released, as (grant, shard).
        self.grants: list[tuple[Grant, int]] = []
        self.loaded: Counter[bytes] = Counter()
        self._done: set[tuple[bytes, int]] = set()
        self._main, self._scheduler = Socket(world), Socket(world)
        self._shards = [Socket(world) for _ in range(_MOST_SHARDS)]
        self._answers = [Socket(world) for _ in range(_MOST_SHARDS)]
        self.alive = True

    # ---- The worker's engine.

    def claim(self, handoff_id: bytes, shard: int) -> None:
        self._shards[shard].post(lambda: self._claim(handoff_id, shard))

    def _claim(self, handoff_id: bytes, shard: int) -> None:
        try:
            grant, effects = self.receiver.claim(handoff_id, shard, self.world.now)
        except TransferRefused:
            return
        self.carry_out(effects)
        self._answers[shard].post(lambda: self._granted(grant, shard))

    def _granted(self, grant: Grant, shard: int) -> None:
        """Keeps a grant, so that its shard is loaded once."""
        is_new = (grant, shard) not in self.grants and (grant.handoff_id, shard) not in self._done
        if is_new:
            self.grants.append((grant, shard))

    def load(self, grant: Grant, shard: int) -> None:
        """Copies a claimed shard; verified bytes must be correct, however late the copy is."""
        self.grants.remove((grant, shard))
        staged, expected = self._bytes(grant), self._expected(grant, shard)
        copied = b""
        for frame in grant.frames:
            at = self._place(grant, frame)
            assert at.start == len(copied)
            data = staged[at]
            if frames.checksum(data) != frame.checksum:
                # The claim has expired, or another shard released it.
                assert self.states[grant.handoff_id] is not ReceiveState.CLAIMED
                return
            copied += data
        assert copied == expected
        self.loaded[grant.handoff_id] += 1
        self._done.add((grant.handoff_id, shard))
        self.release(grant.handoff_id, shard)

    def release(self, handoff_id: bytes, shard: int, *, all_shards: bool = False) -> None:
        """Releases from a shard, or from the scheduler for all shards."""
        socket = self._scheduler if all_shards else self._shards[shard]
        socket.post(
            lambda: self.carry_out(
                self.receiver.release(handoff_id, shard, self.world.now, all_shards=all_shards)
            )
        )

    def drop(self, handoff_id: bytes) -> None:
        """Drops a handoff from the main process."""
        self._main.post(lambda: self.carry_out(self.receiver.drop(handoff_id, self.world.now)))

    def close_sockets(self) -> None:
        """Its processes are dead."""
        for socket in (self._main, self._scheduler, *self._shards, *self._answers):
            socket.close()

    def load_all(self) -> bool:
        """Lets every shard load every committed handoff; returns whether there was one."""
        for handoff_id, state in list(self.states.items()):
            if state in (ReceiveState.COMMITTED, ReceiveState.CLAIMED):
                for shard in range(self.world.layout.num_shards):
                    if (handoff_id, shard) not in self._done:
                        self.claim(handoff_id, shard)
        self.world.settle()
        grants = list(self.grants)
        for grant, shard in grants:
            self.load(grant, shard)
        return bool(grants)

    def check(self) -> None:
        """Checks that the staging of claimed shards has not changed."""
        self.receiver.check_integrity()
        for grant, shard in self.grants:
            if self.states[grant.handoff_id] is ReceiveState.CLAIMED:
                assert self._bytes(grant) == self._expected(grant, shard), grant

    def _place(self, grant: Grant, frame: receive_state.ReceivedFrame) -> slice:
        """Returns the slice of a frame's bytes in its shard."""
        start = (frame.layer * grant.num_blocks + frame.first_block) * self._block_bytes
        return slice(start, start + frame.num_blocks * self._block_bytes)

    @property
    def _block_bytes(self) -> int:
        return self.world.layout.block_bytes

    def _bytes(self, grant: Grant) -> bytes:
        size = self.world.layout.shard_bytes(grant.num_blocks)
        return bytes(self.memory[grant.offset : grant.offset + size])

    def _expected(self, grant: Grant, shard: int) -> bytes:
        """Returns the bytes of the shard."""
        layout = self.world.layout
        whole = truth(grant.handoff_id, layout.handoff_bytes(grant.num_blocks))
        size = layout.shard_bytes(grant.num_blocks)
        return whole[shard * size : (shard + 1) * size]

    # ---- Its transfer service.

    def take(self, stream: Stream, message: bytes) -> None:
        """Takes one message of a stream."""
        try:
            for frame in frames.decode(message):
                self.carry_out(self.receiver.handle_frame(stream.number, frame, self.world.now))
        except MalformedFrame as error:
            self.carry_out(self.receiver.handle_malformed(stream.number, error, self.world.now))
            self._end_unless_served(stream)

    def _pulled(self, serial: int, digest: int | None) -> None:
        self.carry_out(self.receiver.handle_pulled(serial, digest, self.world.now))

    def lose(self, stream: Stream) -> None:
        """Tells the receiver that the stream has ended."""
        stream.receiver_over = stream.ending = True
        self.negotiator.end(stream.number)
        self.carry_out(self.receiver.handle_stream_lost(stream.number, self.world.now))
        stream.down.append(None)

    def carry_out(self, effects: Iterable[receive_state.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, receive_state.Changed):
                before = self.states.get(effect.handoff_id)
                assert before is None or effect.state in receive_state.TRANSITIONS[before], effect
                self.states[effect.handoff_id] = effect.state
                if effect.state is ReceiveState.COMMITTED:
                    self.world.committed.add((effect.handoff_id, effect.epoch))
                continue
            if isinstance(effect, receive_state.Stuck):
                # The service would end; going on is harder.
                continue
            if isinstance(effect, Pull):
                self.negotiator.pull(effect)
                continue
            stream = self.world.stream(effect.stream)
            if stream is None or stream.ending:
                continue
            stream.down.append(
                pb.HandoffReply(
                    kind=effect.kind, handoff_id=effect.handoff_id, epoch=effect.epoch,
                    reason=effect.reason, detail=effect.detail, transport=effect.transport,
                )
            )  # fmt: skip
            if effect.kind != pb.HandoffReply.KIND_OPENED:
                self._end_unless_served(stream)

    def expire(self) -> None:
        self.carry_out(self.receiver.expire(self.world.now))

    def _end_unless_served(self, stream: Stream) -> None:
        if not stream.ending and not self.receiver.serves(stream.number):
            stream.ending = True
            stream.down.append(None)
