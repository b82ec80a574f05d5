"""The parts of vLLM that the connector uses, and a transfer service's receiver.

One token is a byte. The keys and values of a token are a digest of all tokens up to it.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

from baton.kvtransfer import frames
from baton.kvtransfer.arena import Arena
from baton.kvtransfer.engine_port import Claim
from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.frames import FrameKind, Totals
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.local_replies import received_state
from baton.kvtransfer.service.receive_state import Changed, ReceiverLimits
from baton.kvtransfer.service.receiver import Receiver
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.simulated_transports import named

SHARDS, REPLICAS, LAYERS, SIZE, TOKEN_BYTES = 2, 2, 2, 4, 16
LAYOUT = KvLayout(
    "m", "r", "uint8", LAYERS, 1, 8, SIZE, SIZE * TOKEN_BYTES, "heads,tokens,content",
    tp_size=SHARDS * REPLICAS, num_replicas=REPLICAS,
)  # fmt: skip
# Like NaN: a result that is computed from a block with these bytes is poisoned too.
POISON = b"\xff" * TOKEN_BYTES
LIMITS = ReceiverLimits(
    max_wait_s=4, idle_timeout_s=30, commit_ttl_s=30, claim_timeout_s=30, retry_timeout_s=1,
)  # fmt: skip
STAGED_BLOCKS, NUM_BLOCKS = 40, 22


def content(tokens, shard, layer) -> bytes:
    """Returns the keys and values of the last of these tokens."""
    return hashlib.blake2b(bytes([*tokens, 255, shard, layer]), digest_size=TOKEN_BYTES).digest()


def block_content(tokens, index, shard, layer) -> bytes:
    ends = range(index * SIZE + 1, min((index + 1) * SIZE, len(tokens)) + 1)
    return b"".join(content(tokens[:end], shard, layer) for end in ends)


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: tuple | None = None


class Pool:
    """The parts of vLLM's BlockPool that are used; block 0 belongs to no request."""

    enable_caching, num_gpu_blocks, hash_block_size = True, NUM_BLOCKS, SIZE

    def __init__(self):
        self.blocks = [Block(number) for number in range(NUM_BLOCKS)]
        self.free = OrderedDict((block, None) for block in self.blocks[1:])
        self.cached: dict[tuple, Block] = {}

    def get_num_free_blocks(self):
        return len(self.free)

    def get_new_blocks(self, count):
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            assert block.ref_cnt == 0
            self.evict(block)
            block.ref_cnt = 1
        return taken

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                del self.free[block]
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        nameless = []
        for block in blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            if block.ref_cnt == 0 and block.block_hash is None:
                nameless.append(block)
            elif block.ref_cnt == 0:
                self.free[block] = None
        # The first block of the list is the next to be taken.
        for block in reversed(nameless):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def get_cached_block(self, name, groups):
        block = self.cached.get(name)
        return None if block is None else [block]

    def cache_full_blocks(self, request, blocks, num_cached, num_full, size, group):
        for index in range(num_cached, num_full):
            if blocks[index].block_hash is None:
                blocks[index].block_hash = request.block_hashes[index]
                self.cached.setdefault(blocks[index].block_hash, blocks[index])

    def evict(self, block):
        if block.block_hash is not None and self.cached.get(block.block_hash) is block:
            del self.cached[block.block_hash]
        block.block_hash = None


@dataclass(eq=False)
class Request:
    """The parts of vLLM's Request that are used."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict
    block_hashes: list[tuple] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    num_computed: int = 0
    num_outputs: int = 0
    priority: int = 0

    def __post_init__(self):
        self._all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = len(self._all_token_ids)
        self.update_block_hashes()

    @property
    def num_tokens(self):
        return len(self._all_token_ids)

    @property
    def tokens(self):
        return self._all_token_ids

    def update_block_hashes(self):
        begin = len(self.block_hashes) + 1
        ends = range(begin * SIZE, len(self._all_token_ids) + 1, SIZE)
        self.block_hashes += [tuple(self._all_token_ids[:end]) for end in ends]


class Scribbled(Arena):
    """An arena that overwrites every extent that is freed."""

    def __init__(self, memory):
        super().__init__(0, len(memory))
        self.memory = memory

    def free(self, extent):
        self.memory[extent.offset : extent.offset + extent.size_bytes] = b"\xee" * extent.size_bytes
        super().free(extent)


class PendingClaim:
    """A claim that the service grants when it runs."""

    def __init__(self, service, handoff_id, shard):
        self.service, self.handoff_id, self.shard = service, handoff_id, shard
        self.claim, self.is_over = None, False

    def wait(self, timeout_s):
        assert timeout_s >= 0
        if not self.is_over and not self.service.is_stopped:
            self.claim, self.is_over = self.service.claim(self.handoff_id, self.shard), True
        return self.is_over

    def give_up(self):
        if not self.is_over:
            # The service may grant it after all.
            self.service.claim(self.handoff_id, self.shard)
        self.is_over = True


class Service:
    """A receiver, with the interface of an EnginePort for the scheduler and the ranks.

    Attributes:
        is_stopped: Whether claims get no answer.
    """

    alive, is_stopped = True, False

    def __init__(self):
        size = LAYOUT.handoff_bytes(STAGED_BLOCKS)
        self.buffer = bytearray(size)
        self.memory = memoryview(self.buffer)
        self.receiver = Receiver(Scribbled(self.memory), self.memory, LIMITS, named("grpc").choose)
        self.receiver.configure(LAYOUT)
        self.now = 0.0
        self.states: dict[bytes, pb.LocalHandoffState] = {}
        self.given_up: list[bytes] = []

    def told(self, effects):
        for effect in effects:
            if isinstance(effect, Changed):
                state = received_state(effect)
                self.states.pop(effect.handoff_id, None)
                self.states[effect.handoff_id] = state

    # ---- The interface of EnginePort.

    def subscribe(self):
        pass

    def prefault(self):
        pass

    def poll(self):
        states, self.states = list(self.states.values()), {}
        return states

    def abort_send(self, handoff_id):
        self.given_up.append(handoff_id)

    def begin_claim(self, handoff_id, shard):
        return PendingClaim(self, handoff_id, shard)

    def claim(self, handoff_id, shard):
        try:
            grant, effects = self.receiver.claim(handoff_id, shard, self.now)
        except TransferRefused:
            return None
        self.told(effects)
        return Claim.of(claimed(grant))

    def release(self, handoff_id, shard=0, **how):
        self.told(self.receiver.release(handoff_id, shard, self.now, **how))


def claimed(grant):
    return pb.LocalClaimed(
        offset=grant.offset, num_blocks=grant.num_blocks, num_tokens=grant.num_tokens,
        frames=[
            pb.LocalFrame(
                layer=frame.layer, first_block=frame.first_block, num_blocks=frame.num_blocks,
                checksum=frame.checksum,
            )
            for frame in grant.frames
        ],
    )  # fmt: skip


def messages_of(handoff_id, tokens, skip_blocks, *, epoch=1, at_once=3, alter=None):
    """Returns all messages of a prompt: the open, a frame for each block, the commits.

    Args:
        handoff_id: ID of the handoff.
        tokens: The prompt.
        skip_blocks: Number of leading blocks that the handoff leaves out.
        epoch: Epoch of all the messages.
        at_once: Number of blocks that are computed in one chunk.
        alter: Takes a block's bytes, and returns the bytes to send instead.
    """
    num_blocks = LAYOUT.num_blocks(len(tokens)) - skip_blocks
    opened = pb.HandoffOpen(
        handoff_id=handoff_id, epoch=epoch, fingerprint=LAYOUT.fingerprint(),
        num_blocks=num_blocks, num_tokens=len(tokens) - skip_blocks * SIZE, wait_ms=2000,
    )  # fmt: skip
    messages, totals = [frames.encode_open(opened)], [Totals()] * SHARDS
    # The order of a prefill: layer after layer, some blocks at a time.
    for first in range(0, num_blocks, at_once):
        for layer in range(LAYERS):
            for shard in range(SHARDS):
                for block in range(first, min(first + at_once, num_blocks)):
                    data = block_content(tokens, skip_blocks + block, shard, layer)
                    data = data.ljust(LAYOUT.block_bytes, b"\0")
                    sent = alter(data) if alter is not None else data
                    message = frames.encode(
                        FrameKind.DATA, handoff_id, epoch, sent,
                        shard=shard, layer=layer, first_block=block, num_blocks=1,
                    )  # fmt: skip
                    checksum = frames.checksum(data)
                    digest = frames.position_digest(shard, layer, block, 1, checksum)
                    totals[shard] = totals[shard].plus(len(data), digest)
                    messages.append(message)
    return messages + [
        frames.encode(FrameKind.COMMIT, handoff_id, epoch, total.encode(), shard=shard)
        for shard, total in enumerate(totals)
    ]


def flipped(message):
    """Returns a message with its last byte altered."""
    return message[:-1] + bytes([message[-1] ^ 0x40])
