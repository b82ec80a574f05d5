"""The handoffs of a soak, what goes wrong with them, and the workers that they run between."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from enum import Enum

from baton.bench.transfer_workers import Worker
from baton.kvtransfer.control import FIRST_EPOCH, checksum, filled_frame, split_blocks
from baton.kvtransfer.layout import KvLayout
from baton.load import stats

MIB = 2**20
# 6 KiB per block of 4 tokens.
LAYOUT = KvLayout("soak", "soak", "float32", 3, 2, 8, 4, 1024, "heads,tokens,content", tp_size=2)
FRAME_BYTES = 128 * 1024
# Of the workers' places: half of their pairs share memory, a third have only gRPC in common.
TRANSPORTS = (
    ["shm", "gloo", "grpc"],
    ["shm", "grpc"],
    ["gloo", "grpc"],
    ["shm", "grpc"],
)
# How long an engine waits for an answer of its service.
ANSWER_TIMEOUT_S = 10.0
# The first samples of a worker's memory do not count; as many after them are compared with its
# last.
WARM_UP_SAMPLES = 4


class Fault(Enum):
    """What goes wrong with a handoff."""

    NONE = "none"
    ABORTED = "sender aborts"
    DROPPED = "receiver drops"
    UNWANTED = "released without a load"
    ALTERED = "bytes altered"
    NEVER_FILLED = "never finished"
    NEVER_LOADED = "never loaded"
    NEVER_RELEASED = "never released"


class Outcome(Enum):
    """How a handoff ended."""

    LOADED = "loaded, right"
    WRONG = "loaded, WRONG"
    ENDED = "ended unloaded"
    NO_ROOM = "no room"
    LOST = "worker killed"
    UNDUE = "failed UNDULY"
    HUNG = "HUNG"


# Of handoffs, in per cent.
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
        place: index of its transports.
        killed: whether it was killed, or is about to be.
        private_bytes: samples of its service's memory.
        num_files: samples of its service's open files.
        num_handoffs: handoffs from or to it that have not ended.
        idle: set while there are none.
    """

    place: int
    worker: Worker
    killed: bool = False
    private_bytes: list[int] = field(default_factory=list)
    num_files: list[int] = field(default_factory=list)
    num_handoffs: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def taking_part(self, change: int) -> None:
        """A handoff from or to it begins (1) or has ended (-1)."""
        self.num_handoffs += change
        if self.num_handoffs:
            self.idle.clear()
        else:
            self.idle.set()

    def growth_bytes(self) -> float | None:
        """How much its memory has grown since the warm-up; None where it lived too short a time."""
        steady = self.private_bytes[WARM_UP_SAMPLES:]
        if len(steady) < 2 * WARM_UP_SAMPLES:
            return None
        return stats.median(steady[-WARM_UP_SAMPLES:]) - stats.median(steady[:WARM_UP_SAMPLES])


class Undue(Exception):
    """A handoff ended as nothing that was done to it explains."""


@dataclass(slots=True)
class Handoff:
    """One handoff and what goes wrong with it; all random choices follow from its id.

    Attributes:
        source: what they are drawn from.
        epoch: how often its prefill was begun.
        offset: where its bytes lie in the sender's segment; -1 until it is open.
        digest: checksum of all that the sending engine wrote last.
    """

    handoff_id: bytes
    fault: Fault
    sender: Incarnation
    receiver: Incarnation
    num_blocks: int
    source: random.Random
    epoch: int = FIRST_EPOCH
    offset: int = -1
    digest: int = 0

    @property
    def killed(self) -> bool:
        """Whether one of its workers was."""
        return self.sender.killed or self.receiver.killed

    def __str__(self) -> str:
        pair = f"worker {self.sender.place} to {self.receiver.place}"
        return f"{self.handoff_id.hex()}, {pair}, {self.fault.value}"

    def content(self) -> bytes:
        """What the engine writes in this epoch."""
        seed = self.handoff_id + self.epoch.to_bytes(4, "little")
        return random.Random(seed).randbytes(LAYOUT.handoff_bytes(self.num_blocks))

    async def fill(self, num_layers: int = LAYOUT.num_layers, *, alter: bool = False) -> None:
        """Writes layer after layer of every rank, and tells the service; others run in between.

        Args:
            num_layers: how many are written.
            alter: one of the frames has a wrong checksum.
        """
        port, data = self.sender.worker.port, self.content()
        self.digest = checksum(data)
        altered = self.source.randrange(num_layers) if alter else -1
        for layer in range(num_layers):
            for rank in range(LAYOUT.tp_size):
                filled = []
                for first, count in split_blocks(
                    0, self.num_blocks, LAYOUT.block_bytes, FRAME_BYTES
                ):
                    start = LAYOUT.offset(rank, layer, first, self.num_blocks)
                    end = start + count * LAYOUT.block_bytes
                    port.memory[self.offset + start : self.offset + end] = data[start:end]
                    last = layer == LAYOUT.num_layers - 1 and first + count == self.num_blocks
                    filled.append(
                        filled_frame(
                            self.handoff_id, self.epoch, rank, layer, first, count,
                            data[start:end], last=last,
                        )
                    )  # fmt: skip
                if layer == altered and rank == 0:
                    filled[0].checksum ^= 1
                port.send_frames(filled)
            await asyncio.sleep(0)

    def load(self) -> bytes | None:
        """Claims, copies and releases every rank's part; None when one cannot be claimed."""
        port, parts = self.receiver.worker.port, []
        for rank in range(LAYOUT.tp_size):
            claim = port.claim(self.handoff_id, rank, timeout_s=ANSWER_TIMEOUT_S)
            if claim is None:
                return None
            size = LAYOUT.shard_bytes(claim.num_blocks)
            parts.append(bytes(port.memory[claim.offset : claim.offset + size]))
            port.release(self.handoff_id, rank)
        return b"".join(parts)
