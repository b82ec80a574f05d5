"""Measures how fast a transport moves handoffs between two transfer services on this host."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.kvtransfer import arena, loopback, staging_size
from baton.kvtransfer.engine_port import filled_frame, split_blocks
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.loopback import Worker
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

# Largest handoff of a measurement; longer ones take proportionally longer.
MAX_HANDOFF_BYTES = 512 * 2**20
# Share of the free shared memory that both services of a measurement may take together.
_SHARE_OF_FREE = 0.5
_HANDOFF_TIMEOUT_S = 60.0
# Period of the content in bytes: odd, so that no two frames are equal.
_PERIOD_BYTES = 2**20 + 1


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a measurement.

    Attributes:
        num_bytes: Size of one measured handoff.
        handoff_s: Median time of a handoff, from the first report of filled blocks until the
            receiver has verified all bytes. All blocks are filled before.
    """

    num_bytes: int
    handoff_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / self.handoff_s


def measured_blocks(layout: KvLayout, num_blocks: int) -> int:
    """Returns the blocks of a measurable handoff: at most num_blocks, and what memory allows."""
    room = min(MAX_HANDOFF_BYTES, int(arena.free_shared_bytes() * _SHARE_OF_FREE) // 2)
    return max(1, min(num_blocks, layout.num_blocks(staging_size.num_tokens(layout, room))))


async def measure(
    transport: str, layout: KvLayout, num_blocks: int, directory: Path, *, seconds: float = 0.5
) -> Speed:
    """Moves handoffs one after the other from the staging of one service to that of another.

    Args:
        transport: Name of the transport (runtime/kv/kv_transports.py).
        layout: Layout of the KV cache.
        num_blocks: Number of blocks of each handoff.
        directory: Directory of the services' sockets: a short path that only this user can enter.
        seconds: Shortest time to measure, after one handoff as a warm-up.

    Raises:
        TransferError: A service did not start, or a handoff failed; the message says why.
    """
    size = layout.handoff_bytes(num_blocks)
    # Staging holds exactly one handoff, so that each one begins at offset 0.
    config = KvTransferConfig(
        send_bytes=size,
        receive_bytes=size,
        transports=[transport],
        open_timeout_s=_HANDOFF_TIMEOUT_S,
    )
    async with loopback.pair(config, config, directory, layout) as (sender, receiver):
        frames = _fill(sender, layout, num_blocks)
        try:
            await _hand_over(sender, receiver, layout, num_blocks, frames)
            times, started = list[float](), time.monotonic()
            while not times or time.monotonic() - started < seconds:
                times.append(await _hand_over(sender, receiver, layout, num_blocks, frames))
        except TimeoutError:
            raise TransferError(f"a handoff took more than {_HANDOFF_TIMEOUT_S:g} s") from None
    return Speed(size, statistics.median(times))


def _fill(sender: Worker, layout: KvLayout, num_blocks: int) -> list[pb.LocalFrame]:
    """Writes a handoff to the beginning of staging; returns its frames, without the handoff ID."""
    memory = sender.port.memory[: layout.handoff_bytes(num_blocks)]
    period = random.Random(0).randbytes(_PERIOD_BYTES)
    for start in range(0, len(memory), _PERIOD_BYTES):
        part = memory[start : start + _PERIOD_BYTES]
        part[:] = period[: len(part)]
    frames = []
    for shard in range(layout.num_shards):
        for layer in range(layout.num_all_layers):
            group = layout.group_of(layer)
            held = layout.blocks(group, num_blocks)
            for first, count in split_blocks(held.start, len(held), group.block_bytes):
                start = layout.offset(shard, layer, first, num_blocks)
                data = memory[start : start + count * group.block_bytes]
                frames.append(filled_frame(b"", shard, layer, first, count, data))
        frames[-1].last = True
    return frames


async def _hand_over(
    sender: Worker,
    receiver: Worker,
    layout: KvLayout,
    num_blocks: int,
    frames: Sequence[pb.LocalFrame],
) -> float:
    """Moves one handoff; returns the time in seconds until it is verified."""
    handoff_id = secrets.token_bytes(16)
    for frame in frames:
        frame.handoff_id = handoff_id
    async with asyncio.timeout(_HANDOFF_TIMEOUT_S):
        with sender.watching(handoff_id) as sending, receiver.watching(handoff_id) as receiving:
            await sender.client.open_send(
                handoff_id,
                receiver.client.address,
                num_blocks,
                num_blocks * layout.counted_tokens,
                _HANDOFF_TIMEOUT_S,
            )
            started = time.monotonic()
            sender.port.send_frames(frames)
            sent = await sending.sent()
            taken_s = time.monotonic() - started
            if sent.state != pb.LocalSendState.STATE_COMMITTED:
                raise TransferError(f"a handoff failed: {sent.detail}")
            await receiving.received(pb.HANDOFF_STATE_COMMITTED)
            receiver.port.release(handoff_id, all_shards=True)
    return taken_s
