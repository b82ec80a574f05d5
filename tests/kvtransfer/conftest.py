"""Real transfer services on loopback, and the part of an engine that copies and notifies."""

import asyncio
import itertools
import os
import random
import secrets
from dataclasses import dataclass, field

import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.arena import SEGMENT_DIRECTORY
from baton.kvtransfer.engine_port import EnginePort, filled_frame
from baton.kvtransfer.errors import ServiceGone
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.forked_services import forked_services

__all__ = ["forked_services"]

# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0
LAYOUT = KvLayout("m", "r", "float32", 3, 2, 8, 4, 4096, "heads,tokens,content", tp_size=2)


@dataclass
class Worker:
    """One worker's service, its main process's client and its engine's port."""

    client: TransferClient
    port: EnginePort
    sends: dict[bytes, pb.LocalSendState] = field(default_factory=dict)
    receives: dict[bytes, pb.LocalHandoffState] = field(default_factory=dict)

    @property
    def segment_path(self):
        return SEGMENT_DIRECTORY / self.port.description.shm_name

    async def until(self, done):
        """Takes events until `done()` is true."""
        async with asyncio.timeout(WAIT_S):
            while not done():
                for event in await self.client.next_events():
                    kept = self.sends if isinstance(event, pb.LocalSendState) else self.receives
                    kept[event.handoff_id] = event

    async def sent(self, handoff_id):
        """Returns how a send ended; aborts a failed send, as the engine's request would."""
        await self.until(lambda: handoff_id in self.sends)
        if self.sends[handoff_id].state == pb.LocalSendState.STATE_FAILED:
            self.client.abort_send(handoff_id)
        return self.sends[handoff_id]

    async def received(self, handoff_id, state):
        """Waits until an incoming handoff has a state."""
        await self.until(lambda: self.state(handoff_id) == state)
        return self.receives[handoff_id]

    def state(self, handoff_id):
        known = self.receives.get(handoff_id)
        return None if known is None else known.state

    async def empty(self, *, may_expire=False):
        """Waits until the service holds nothing; unless `may_expire`, nothing may have expired."""
        async with asyncio.timeout(WAIT_S):
            while True:
                stats = await self.client.stats()
                used = stats.send_bytes_used + stats.receive_bytes_used
                if used + stats.num_sends + stats.num_receives == 0:
                    assert may_expire or stats.expiries == 0
                    return stats
                await asyncio.sleep(0.02)


class Handoff:
    """One handoff: its correct bytes, and an engine that fills and loads them."""

    def __init__(self, num_blocks, epoch=1):
        self.handoff_id, self.num_blocks, self.epoch = secrets.token_bytes(16), num_blocks, epoch
        self.num_tokens = num_blocks * LAYOUT.block_size_tokens
        self.offset = -1
        self.refresh()

    def refresh(self):
        """Replaces the bytes, as when the prompt is computed again."""
        self.data = random.Random(secrets.token_bytes(8)).randbytes(
            LAYOUT.handoff_bytes(self.num_blocks)
        )

    async def open(self, sender, target, wait_s=WAIT_S):
        self.offset = await sender.client.open_send(
            self.handoff_id, target, self.num_blocks, self.num_tokens, wait_s
        )

    def fill(self, sender, layers=range(LAYOUT.num_layers), shards=range(LAYOUT.tp_size)):
        """Writes layers to staging and reports them, one call per shard."""
        size = self.num_blocks * LAYOUT.block_bytes
        for shard in shards:
            filled = []
            for layer in layers:
                start = LAYOUT.offset(shard, layer, 0, self.num_blocks)
                data = self.data[start : start + size]
                sender.port.memory[self.offset + start : self.offset + start + size] = data
                last = layer == LAYOUT.num_layers - 1
                filled.append(
                    filled_frame(
                        self.handoff_id, shard, layer, 0, self.num_blocks, data,
                        last=last,
                    )
                )  # fmt: skip
            assert sender.port.send_frames(filled)

    def load(self, receiver):
        """Claims, copies and releases every shard; None when a claim fails."""
        loaded = []
        for shard in range(LAYOUT.tp_size):
            claim = receiver.port.claim(self.handoff_id, shard, timeout_s=WAIT_S)
            if claim is None:
                return None
            size = LAYOUT.shard_bytes(claim.num_blocks)
            data = bytes(receiver.port.memory[claim.offset : claim.offset + size])
            for frame in claim.frames:
                start = (frame.layer * claim.num_blocks + frame.first_block) * LAYOUT.block_bytes
                end = start + frame.num_blocks * LAYOUT.block_bytes
                assert frames.checksum(data[start:end]) == frame.checksum
            loaded.append(data)
            receiver.port.release(self.handoff_id, shard)
        return b"".join(loaded)


@pytest.fixture
async def start(tmp_path, forked_services):
    """Starts workers; ends them, and checks that no file of them is left."""
    workers, numbers = [], itertools.count()

    async def start_one(layout=LAYOUT, **config):
        config = {"send_bytes": 2**20, "receive_bytes": 2**20, "open_timeout_s": WAIT_S, **config}
        socket_path = str(tmp_path / f"{next(numbers)}.sock")
        # Several services that import torch at once are slow to start.
        client = await TransferClient.start(
            KvTransferConfig(**config), socket_path, timeout_s=WAIT_S
        )
        worker = Worker(client, EnginePort(socket_path, timeout_s=WAIT_S))
        workers.append(worker)
        if layout is not None:
            await client.configure(layout.fingerprint())
        return worker

    yield start_one
    for worker in workers:
        worker.port.close()
        await worker.client.close()
        assert not worker.segment_path.exists()
        with pytest.raises(ServiceGone):
            await worker.client.stats()
    assert os.listdir(tmp_path) == []


@pytest.fixture
async def pair(start):
    """A sending and a receiving worker; the receiver's port is subscribed to states."""
    sender, receiver = await asyncio.gather(start(), start())
    assert receiver.port.subscribe()
    return sender, receiver


@pytest.fixture
def handoff():
    return Handoff


@pytest.fixture
def layout():
    return LAYOUT
