"""The handoffs of bench/soak.py, their injected faults, and the workers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from enum import Enum

from baton.kvtransfer.engine_port import filled_frame, split_blocks
from baton.kvtransfer.frames import checksum
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.loopback import Worker
from baton.load import stats

MIB = 2**20
# 6 KiB per block of 4 tokens.
LAYOUT = KvLayout("soak", "soak", "float32", 3, 2, 8, 4, 1024, "heads,tokens,content", tp_size=2)
FRAME_BYTES = 128 * 1024
# Transports of each worker. Half of the pairs have shm in common, a third have only gRPC.
TRANSPORTS = (
    ["shm", "gloo", "grpc"],
    ["shm", "grpc"],
    ["gloo", "grpc"],
    ["shm", "grpc"],
)
# Timeout of an engine's calls to its service.
ANSWER_TIMEOUT_S = 10.0
# The first samples of a worker's memory are ignored. The same number of samples after them is
# compared with the last ones.
WARM_UP_SAMPLES = 4


class Fault(Enum):
    """Fault that is injected into a handoff."""

    NONE = "none"
    ABORTED = "sender aborts"
    DROPPED = "receiver drops"
    UNWANTED = "released without a load"
    ALTERED = "bytes altered"
    NEVER_FILLED = "never finished"
    NEVER_LOADED = "never loaded"
    NEVER_RELEASED = "never released"


class Outcome(Enum):
    """Outcome of a handoff."""

    LOADED = "loaded, right"
    WRONG = "loaded, WRONG"
    ENDED = "ended without load"
    NO_ROOM = "no room"
    LOST = "worker killed"
    UNDUE = "failed WITHOUT CAUSE"
    HUNG = "HUNG"


# Weight of each fault in the random choice.
SHARES = {
    Fault.NONE: 61,
    Fault.ABORTED: 9,
    Fault.DROPPED: 8,
    Fault.UNWANTED: 6,
    Fault.ALTERED: 4,
    Fault.NEVER_FILLED: 1,
    Fault.NEVER_LOADED: 1,
    Fault.NEVER_RELEASED: 1,
}


@dataclass(slots=True)
class Incarnation:
    """One worker from its start to its end.

    Attributes:
        place: Index of the worker's transports in TRANSPORTS.
        killed: Whether the worker was killed or is about to be killed.
        private_bytes: Samples of the service's private memory.
        num_files: Samples of the number of open files of the service.
        num_handoffs: Running handoffs from or to this worker.
        idle: Set while there are no such handoffs.
    """

    place: int
    worker: Worker
    killed: bool = False
    private_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    num_handoffs: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def taking_part(self, change: int) -> None:
        """Counts a handoff from or to this worker that begins (1) or has ended (-1)."""
        self.num_handoffs += change
        if self.num_handoffs:
            self.idle.clear()
        else:
            self.idle.set()

    def growth_bytes(self) -> float | None:
        """Returns the memory growth since the warm-up; None if there are too few samples."""
        steady = self.private_bytes[WARM_UP_SAMPLES:]
        if len(steady) < 2 * WARM_UP_SAMPLES:
            return None
        return stats.median(steady[-WARM_UP_SAMPLES:]) - stats.median(steady[:WARM_UP_SAMPLES])


class Undue(Exception):
    """A handoff ended in a way that its injected fault does not explain."""


@dataclass(slots=True)
class Handoff:
    """One handoff with its fault; all its random choices follow from its ID.

    Attributes:
        source: Random generator of this handoff.
        offset: Offset of the bytes in the sender's segment; -1 until the handoff is open.
        digest: Checksum of the bytes that the sending engine wrote last.
    """

    handoff_id: bytes
    fault: Fault
    sender: Incarnation
    receiver: Incarnation
    num_blocks: int
    source: random.Random
    offset: int = -1
    digest: int = 0

    @property
    def killed(self) -> bool:
        """Whether the sender or the receiver was killed."""
        return self.sender.killed or self.receiver.killed

    def __str__(self) -> str:
        pair = f"worker {self.sender.place} to {self.receiver.place}"
        return f"{self.handoff_id.hex()}, {pair}, {self.fault.value}"

    def content(self) -> bytes:
        """Returns the bytes that the sending engine writes."""
        return random.Random(self.handoff_id).randbytes(LAYOUT.handoff_bytes(self.num_blocks))

    async def fill(self, num_layers: int = LAYOUT.num_layers, *, alter: bool = False) -> None:
        """Writes layer after layer of every shard and notifies the service of each layer.

        Args:
            num_layers: Number of layers to write.
            alter: Whether one of the frames gets a wrong checksum.
        """
        port, data = self.sender.worker.port, self.content()
        self.digest = checksum(data)
        altered = self.source.randrange(num_layers) if alter else -1
        for layer in range(num_layers):
            for shard in range(LAYOUT.tp_size):
                filled = []
                for first, count in split_blocks(
                    0, self.num_blocks, LAYOUT.block_bytes, FRAME_BYTES
                ):
                    start = LAYOUT.offset(shard, layer, first, self.num_blocks)
                    end = start + count * LAYOUT.block_bytes
                    port.memory[self.offset + start : self.offset + end] = data[start:end]
                    last = layer == LAYOUT.num_layers - 1 and first + count == self.num_blocks
                    filled.append(
                        filled_frame(
                            self.handoff_id, shard, layer, first, count,
                            data[start:end], last=last,
                        )
                    )  # fmt: skip
                if layer == altered and shard == 0:
                    filled[0].checksum ^= 1
                port.send_frames(filled)
            await asyncio.sleep(0)

    def load(self) -> bytes | None:
        """Claims, copies and releases every shard; returns None if a claim fails."""
        port, shards = self.receiver.worker.port, []
        for shard in range(LAYOUT.tp_size):
            claim = port.claim(self.handoff_id, shard, timeout_s=ANSWER_TIMEOUT_S)
            if claim is None:
                return None
            size = LAYOUT.shard_bytes(claim.num_blocks)
            shards.append(bytes(port.memory[claim.offset : claim.offset + size]))
            port.release(self.handoff_id, shard)
        return b"".join(shards)
