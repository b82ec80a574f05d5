"""A receiver with its memory, and the frames of correct senders."""

import random

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.receive_state import (
    TRANSITIONS,
    Changed,
    ReceiverLimits,
    ReceiveState,
    Reply,
    Stuck,
)
from baton.kvtransfer.service.receiver import Receiver
from baton.runtime.kv import kv_fingerprint
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_transports import named

LAYOUT = KvLayout("m", "r", "float32", 2, 1, 8, 4, 128, "heads,tokens,content", tp_size=2)


LIMITS = ReceiverLimits(
    max_wait_s=4, idle_timeout_s=3, commit_ttl_s=6, claim_timeout_s=2, retry_timeout_s=1,
    max_queued=3, max_tombstones=64,
)  # fmt: skip


# Room for four handoffs of one block, or one of four.
ARENA_BYTES = LAYOUT.handoff_bytes(4)


IDS = [bytes([number]) * 16 for number in range(1, 6)]


def truth(handoff_id: bytes, epoch: int, num_blocks: int) -> bytes:
    """Returns the bytes of a handoff, which differ in every epoch."""
    generator = random.Random(f"{handoff_id.hex()} {epoch} {num_blocks}")
    return generator.randbytes(LAYOUT.handoff_bytes(num_blocks))


def open_message(
    handoff_id, epoch, num_blocks, *, layout=LAYOUT, wait_ms=2000, offers=(), fingerprint=None
) -> bytes:
    return frames.encode_open(
        pb.HandoffOpen(
            handoff_id=handoff_id,
            epoch=epoch,
            fingerprint=fingerprint or layout.fingerprint(),
            num_blocks=num_blocks,
            num_tokens=num_blocks * layout.block_size_tokens,
            wait_ms=wait_ms,
            offers=offers,
        )
    )


def drafted(**changed) -> pb.KvFingerprint:
    """Returns the fingerprint of a sender with a draft of one layer that fits, but for changes."""
    fields = {"num_layers": 1, "num_kv_heads": 1, "block_size_tokens": 4, "block_bytes": 32}
    fingerprint = LAYOUT.fingerprint()
    fingerprint.layout = kv_fingerprint.axes_with_draft(fingerprint.layout)
    fingerprint.draft_revision = "eagle weights"
    group = pb.KvGroup(kind=pb.KvGroup.KIND_FULL)
    for name, value in {**fields, **changed}.items():
        setattr(group, name, value)
    fingerprint.draft_groups.append(group)
    return fingerprint


def data_message(handoff_id, epoch, num_blocks, shard, layer, first, count) -> bytes:
    start = LAYOUT.offset(shard, layer, first, num_blocks)
    payload = truth(handoff_id, epoch, num_blocks)[start : start + count * LAYOUT.block_bytes]
    return frames.encode(
        FrameKind.DATA, handoff_id, epoch, payload,
        shard=shard, layer=layer, first_block=first, num_blocks=count,
    )  # fmt: skip


def honest_messages(handoff_id, epoch, num_blocks) -> tuple[list[bytes], list[bytes]]:
    """Returns the data frames of a handoff, one block each, and the commits of its shards."""
    data, commits = [], []
    for shard in range(LAYOUT.tp_size):
        totals = Totals()
        for layer in range(LAYOUT.num_layers):
            for block in range(num_blocks):
                message = data_message(handoff_id, epoch, num_blocks, shard, layer, block, 1)
                (frame,) = frames.decode(message)
                digest = frames.position_digest(shard, layer, block, 1, frame.checksum)
                totals = totals.plus(LAYOUT.block_bytes, digest)
                data.append(message)
        commits.append(
            frames.encode(FrameKind.COMMIT, handoff_id, epoch, totals.encode(), shard=shard)
        )
    return data, commits


class Harness:
    """A receiver with its memory; tests deliver messages to it."""

    def __init__(self, limits=LIMITS, transports=("grpc",)):
        self.memory = memoryview(bytearray(ARENA_BYTES))
        choose = named(*transports).choose
        self.receiver = Receiver(Arena(0, ARENA_BYTES), self.memory, limits, choose)
        self.receiver.configure(LAYOUT)
        self.now = 0.0
        self.stuck = ""
        self.states: dict[bytes, ReceiveState] = {}
        # Epoch for which each handoff last got its staging.
        self.opened: dict[bytes, int] = {}

    def deliver(self, stream: int, message: bytes) -> list[Reply]:
        replies: list[Reply] = []
        try:
            for frame in frames.decode(message):
                replies += self.seen(self.receiver.handle_frame(stream, frame, self.now))
        except MalformedFrame as error:
            replies += self.seen(self.receiver.handle_malformed(stream, error, self.now))
        return replies

    def seen(self, effects) -> list[Reply]:
        for effect in effects:
            if isinstance(effect, Changed):
                before = self.states.get(effect.handoff_id)
                if before is not None:
                    assert effect.state in TRANSITIONS[before], (before, effect)
                self.states[effect.handoff_id] = effect.state
            elif isinstance(effect, Stuck):
                self.stuck = effect.detail
            elif effect.kind == pb.HandoffReply.KIND_OPENED:
                self.opened[effect.handoff_id] = effect.epoch
        return [effect for effect in effects if isinstance(effect, Reply)]

    def send_all(self, stream, handoff_id, epoch, num_blocks, order=None) -> list[Reply]:
        data, commits = honest_messages(handoff_id, epoch, num_blocks)
        if order is not None:
            order.shuffle(data)
        return [reply for message in data + commits for reply in self.deliver(stream, message)]

    def tick(self, seconds: float) -> list[Reply]:
        self.now += seconds
        return self.seen(self.receiver.expire(self.now))

    def bytes_of(self, grant) -> bytes:
        size = LAYOUT.shard_bytes(grant.num_blocks)
        return bytes(self.memory[grant.offset : grant.offset + size])

    def assert_empty(self):
        self.receiver.check_integrity()
        assert self.receiver.num_live == 0
        assert self.receiver.arena_statistics().used_bytes == 0
        assert self.receiver.next_deadline() is None


def shard_truth(grant, shard, epoch=1) -> bytes:
    size = LAYOUT.shard_bytes(grant.num_blocks)
    whole = truth(grant.handoff_id, epoch, grant.num_blocks)
    return whole[shard * size : (shard + 1) * size]


def kinds(replies) -> list[tuple[int, int]]:
    return [(reply.kind, reply.reason) for reply in replies]


OPENED = [(pb.HandoffReply.KIND_OPENED, 0)]


def refused(reason) -> list[tuple[int, int]]:
    return [(pb.HandoffReply.KIND_REFUSED, reason)]
