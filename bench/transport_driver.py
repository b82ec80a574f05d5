"""Plays both engines of a pair of transfer services, with synthetic KV caches.

The sender's staging holds its content from the start, as if a GPU had written it. Filling a layer
is therefore only the notification of the service, at the time at which a model with the configured
rate would have computed the layer.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.kvtransfer.engine_port import split_blocks
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.frames import FRAME_TARGET_BYTES, checksum
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.loopback import Worker
from baton.load import stats
from baton.v1 import kv_transfer_pb2 as pb

GB = 1e9
# Number of handoffs that fit into each staging segment.
STAGED_HANDOFFS = 5
# The first handoff of a run and every eighth after it are read again completely.
VERIFY_EVERY = 8
HANDOFF_TIMEOUT_S = 60.0
# A paced engine that is late by less than this catches up; otherwise its schedule is shifted.
MAX_CATCH_UP_S = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The KV cache layout of a model on one rank, and a prompt length.

    Attributes:
        num_tokens: Tokens per handoff.
    """

    name: str
    layout: KvLayout
    num_tokens: int

    @property
    def num_blocks(self) -> int:
        return self.layout.num_blocks(self.num_tokens)

    @property
    def handoff_bytes(self) -> int:
        return self.layout.handoff_bytes(self.num_blocks)

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def fitting(self, staging_bytes: int) -> Shape:
        """Returns this shape with a prompt short enough that STAGED_HANDOFFS fit into staging."""
        most = staging_bytes // STAGED_HANDOFFS // self.layout.handoff_bytes(1)
        num_tokens = min(self.num_tokens, most * self.layout.block_size_tokens)
        return Shape(self.name, self.layout, num_tokens)


def _llama(name: str, num_layers: int, num_kv_heads: int, num_tokens: int) -> Shape:
    """Returns a shape with blocks of 16 tokens, head size 128, and bfloat16 keys and values."""
    block_bytes = 2 * num_kv_heads * 128 * 16 * 2
    axes = "heads,tokens,content"
    layout = KvLayout(
        name, "bench", "bfloat16", num_layers, num_kv_heads, 128, 16, block_bytes, axes
    )
    return Shape(name, layout, num_tokens)


SHAPES = {
    shape.name: shape
    for shape in (
        _llama("Llama-8B", 32, 8, 2048),
        _llama("Llama-70B at TP 8", 80, 1, 4096),
        _llama("Llama-70B at TP 4", 80, 2, 4096),
    )
}


@dataclass(slots=True)
class Run:
    """The figures of one run, which begins and ends with idle services.

    Attributes:
        rate_gb_s: Rate at which the KV cache was filled; None: filled at once.
        streams: Handoffs in flight.
        num_verified: Handoffs with all bytes read again.
    """

    transport: str
    shape: str
    rate_gb_s: float | None
    streams: int
    num_handoffs: int = 0
    num_bytes: int = 0
    num_verified: int = 0
    wall_s: float = 0.0
    sender_cpu_s: float = 0.0
    receiver_cpu_s: float = 0.0
    driver_cpu_s: float = 0.0
    exposed_ms: list[float] = field(default_factory=list)

    @property
    def gb_s(self) -> float:
        return self.num_bytes / GB / self.wall_s

    def figures(self) -> dict[str, Any]:
        moved = self.num_bytes / GB
        return {
            **asdict(self),
            "gb_s": self.gb_s,
            "exposed_p50_ms": stats.median(self.exposed_ms),
            "exposed_p95_ms": stats.percentile(self.exposed_ms, 95),
            "sender_cpu_s_per_gb": self.sender_cpu_s / moved,
            "receiver_cpu_s_per_gb": self.receiver_cpu_s / moved,
            "driver_cpu_s_per_gb": self.driver_cpu_s / moved,
        }


class Driver:
    """Plays both engines of one pair.

    Args:
        sender, receiver: The workers.
        shape: Layout and prompt length.
        transport: Transport that every handoff must use.
    """

    def __init__(self, sender: Worker, receiver: Worker, shape: Shape, transport: str) -> None:
        self._sender, self._receiver = sender, receiver
        self._shape, self._transport = shape, transport
        # The decode engine needs a thread, because calls of its port block.
        self._loading = ThreadPoolExecutor(1)
        self._checksums: dict[tuple[int, int], int] = {}
        # One prompt prefills at a time; `_free_at` is the scheduled end of the last prefill.
        self._prefilling = asyncio.Lock()
        self._free_at = 0.0
        write_content(sender.port.memory[: sender.client.send_bytes])

    def close(self) -> None:
        self._loading.shutdown()

    async def run(self, rate_gb_s: float | None, streams: int, seconds: float) -> Run:
        """Makes handoffs for `seconds`, then waits until all of them have ended.

        Args:
            rate_gb_s: One engine prefills prompt after prompt at this rate, with `streams` handoffs
                in flight. None: all layers of a handoff are filled at once.
            streams: Handoffs in flight, at most STAGED_HANDOFFS.
            seconds: Duration; 0 means one handoff per stream.

        Raises:
            TransferError: a handoff failed, used another transport, or had wrong bytes.
        """
        run = Run(self._transport, self._shape.name, rate_gb_s, streams)
        started = self._free_at = time.monotonic()
        cpu = self._cpu_s()
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._hand_over_until(started + seconds, run))
        run.wall_s = time.monotonic() - started
        run.sender_cpu_s, run.receiver_cpu_s, run.driver_cpu_s = (
            after - before for before, after in zip(cpu, self._cpu_s(), strict=True)
        )
        return run

    def _cpu_s(self) -> tuple[float, float, float]:
        return self._sender.cpu_s(), self._receiver.cpu_s(), time.process_time()

    async def _hand_over_until(self, deadline: float, run: Run) -> None:
        while True:
            async with asyncio.timeout(HANDOFF_TIMEOUT_S):
                await self._hand_over(run)
            if time.monotonic() >= deadline:
                return

    async def _hand_over(self, run: Run) -> None:
        handoff_id, shape = secrets.token_bytes(16), self._shape
        target, sender = self._receiver.client.address, self._sender.client
        verify = run.num_handoffs % VERIFY_EVERY == 0
        run.num_handoffs += 1
        with (
            self._sender.watching(handoff_id) as sending,
            self._receiver.watching(handoff_id) as receiving,
        ):
            offset = await sender.open_send(
                handoff_id, target, shape.num_blocks, shape.num_tokens, HANDOFF_TIMEOUT_S
            )
            layers = self._layers(handoff_id, offset)
            if run.rate_gb_s is None:
                for layer in layers:
                    self._sender.port.send_frames(layer)
            else:
                await self._prefill(layers, shape.layer_bytes / (run.rate_gb_s * GB))
            sent = await sending.sent()
            if sent.state != pb.LocalSendState.STATE_COMMITTED:
                raise TransferError(f"{self._transport}: a handoff failed: {sent.detail}")
            if sent.transport != self._transport or sent.num_fallbacks:
                raise TransferError(f"{self._transport}: a handoff went by {sent.transport!r}")
            await receiving.received(pb.HANDOFF_STATE_COMMITTED)
            await asyncio.get_running_loop().run_in_executor(
                self._loading, self._load, handoff_id, offset, verify
            )
        run.num_bytes += sent.num_bytes
        run.num_verified += verify
        run.exposed_ms.append(sent.exposed_us / 1e3)

    async def _prefill(self, layers: Sequence[list[pb.LocalFrame]], layer_s: float) -> None:
        """Fills layer after layer at the times at which a model would have computed them."""
        async with self._prefilling:
            now = time.monotonic()
            due = self._free_at if now - self._free_at < MAX_CATCH_UP_S else now
            for layer in layers:
                due += layer_s
                if (wait_s := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                self._sender.port.send_frames(layer)
            self._free_at = due

    def _layers(self, handoff_id: bytes, offset: int) -> list[list[pb.LocalFrame]]:
        """Returns the notifications of a whole handoff by layer; its staging begins at `offset`."""
        layout, num_blocks = self._shape.layout, self._shape.num_blocks
        layers = []
        for layer in range(layout.num_layers):
            filled = []
            for first, count in split_blocks(0, num_blocks, layout.block_bytes):
                start = offset + layout.offset(0, layer, first, num_blocks)
                filled.append(
                    pb.LocalFrame(
                        handoff_id=handoff_id,
                        layer=layer,
                        first_block=first,
                        num_blocks=count,
                        checksum=self._checksum(start, count * layout.block_bytes),
                    )
                )
            layers.append(filled)
        layers[-1][-1].last = True
        return layers

    def _checksum(self, start: int, size: int) -> int:
        """Returns the checksum of a part of the sender's staging; the content never changes."""
        known = self._checksums.get((start, size))
        if known is None:
            known = checksum(self._sender.port.memory[start : start + size])
            self._checksums[start, size] = known
        return known

    def _load(self, handoff_id: bytes, sent_from: int, verify: bool) -> None:
        """Plays a decode engine for a committed handoff, without the copy into the KV cache."""
        port, layout = self._receiver.port, self._shape.layout
        claim = port.claim(handoff_id, 0, timeout_s=HANDOFF_TIMEOUT_S)
        if claim is None:
            raise TransferError(f"{self._transport}: a committed handoff could not be claimed")
        if verify:
            for frame in claim.frames:
                at = layout.offset(0, frame.layer, frame.first_block, claim.num_blocks)
                size = frame.num_blocks * layout.block_bytes
                loaded = checksum(port.memory[claim.offset + at : claim.offset + at + size])
                if loaded != self._checksum(sent_from + at, size):
                    raise TransferError(f"{self._transport}: wrong bytes in layer {frame.layer}")
            blocks = sum(frame.num_blocks for frame in claim.frames)
            if blocks != layout.num_layers * claim.num_blocks:
                raise TransferError(f"{self._transport}: {blocks} blocks in a handoff")
        port.release(handoff_id)


def write_content(memory: memoryview) -> None:
    """Fills memory so that no two frames are equal: the period is odd and longer than a frame."""
    period = random.Random(0).randbytes(FRAME_TARGET_BYTES + 4097)
    for start in range(0, len(memory), len(period)):
        part = memory[start : start + len(period)]
        part[:] = period[: len(part)]
