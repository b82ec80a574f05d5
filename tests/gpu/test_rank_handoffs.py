"""A handoff through the ranks' halves of two connectors and two real transfer services."""

import asyncio
import dataclasses
import itertools
import random
import secrets
import threading

import pytest
import torch

from baton.kvtransfer.connector.handoffs import rank_handoffs
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies
from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, Load, Part, Save
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 64, 2, 16, 64
BLOCK_BYTES = HEADS * TOKENS * CONTENT * 2
LAYOUT = KvLayout(
    "m", "r", "bfloat16", LAYERS, HEADS, CONTENT // 2, TOKENS, BLOCK_BYTES, "heads,tokens,content"
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA GPU"),
        ],
    ),
]


class Worker:
    """A transfer service and a rank beside it; the test fills the rank's cache."""

    def __init__(self, client, device, order, rank=0, layout=LAYOUT):
        self.client = client
        self.port = EnginePort(client.socket_path)
        self.rank = RankHandoffs(client.socket_path, self.port, rank, layout)
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16, device=device)
        back = [order.index(axis) for axis in range(4)]
        self.caches = {f"layer.{index}": memory.clone().permute(back) for index in range(LAYERS)}
        self.rank.register(self.caches)

    def step(
        self, saves=(), loads=(), ended=(), compute=None, cleared=(), in_graph=(), releases=True
    ):
        """Makes a step as vLLM's model runner does; returns the invalid block IDs.

        Args:
            saves: Blocks to copy into staging.
            loads: Blocks to fill.
            ended: Handoffs that get no more saves.
            compute: Writes the cache of a layer, as the model does.
            cleared: Blocks to fill with zeros first.
            in_graph: Layers that a CUDA graph computes without calling the connector.
            releases: Whether all ranks release the loaded handoffs after the step.
        """
        metadata = HandoffStep(list(saves), list(loads), list(ended), list(cleared))
        self.rank.begin_step(metadata)
        if loads:
            self.rank.load(metadata)
        for name, cache in self.caches.items():
            if compute is not None:
                compute(name, cache)
            if name not in in_graph:
                self.rank.save(name)
        if not loads:
            # vLLM calls it after the model in steps without synchronous loads.
            self.rank.load(metadata)
        self.rank.end_step()
        invalid = self.rank.take_invalid_block_ids()
        self.failed = self.rank.take_report().failed
        for load in loads if releases else ():
            # HandoffScheduler does this when the step has ended.
            self.port.release(load.handoff_id, all_shards=True)
        return invalid

    async def close(self):
        self.rank.close()
        self.port.close()
        await self.client.close()


async def start_workers(tmp_path, device):
    """Returns a sender and a receiver."""
    started = []
    # The receiver's memory is laid out differently.
    for number, order in enumerate([(0, 1, 2, 3), (0, 2, 1, 3)]):
        config = KvTransferConfig(send_bytes=2**22, receive_bytes=2**22)
        client = await TransferClient.start(config, str(tmp_path / f"{number}.sock"))
        await client.configure(LAYOUT.fingerprint())
        started.append(Worker(client, device, order))
    assert started[1].port.subscribe()
    return started


class Joined(CpuDeviceCopies):
    """Copies that take several layers at a time, and five blocks, as those of a GPU do."""

    finishes_at_once = False
    joined_bytes = 5 * BLOCK_BYTES

    def max_blocks(self, layer):
        return 5


@pytest.fixture(params=[*DEVICES, "joined"])
async def workers(request, tmp_path, monkeypatch):
    device = request.param
    if device == "joined":
        monkeypatch.setattr(rank_handoffs, "open_copies", Joined)
        device = "cpu"
    started = await start_workers(tmp_path, device)
    yield started
    for worker in started:
        await worker.close()


async def until(done, timeout_s=20):
    async with asyncio.timeout(timeout_s):
        while not done():
            await asyncio.sleep(0.01)


async def committed(worker, *handoff_ids):
    missing = set(handoff_ids)

    def are_there():
        for state in worker.port.poll():
            if state.state == pb.HANDOFF_STATE_COMMITTED:
                missing.discard(state.handoff_id)
        return not missing

    await until(are_there)


async def empty(worker):
    async with asyncio.timeout(20):
        while True:
            stats = await worker.client.stats()
            if stats.send_bytes_used + stats.receive_bytes_used == 0:
                return
            await asyncio.sleep(0.01)


async def opened(sender, receiver, num_blocks):
    handoff_id = secrets.token_bytes(16)
    offset = await sender.client.open_send(
        handoff_id, receiver.client.address, num_blocks, num_blocks * TOKENS, 5.0
    )
    return handoff_id, offset


def writes(values):
    """Returns a model that writes a distinct number into blocks of each layer."""

    def compute(name, cache):
        layer = int(name.removeprefix("layer."))
        for block_id, value in values.items():
            cache[block_id] = value + 100 * layer

    return compute


async def test_blocks_computed_in_steps_are_loaded_in_another_order(workers):
    sender, receiver = workers
    num_blocks = 20
    shuffled = random.Random(3).sample(range(BLOCKS), 2 * num_blocks)
    source, target = shuffled[:num_blocks], shuffled[num_blocks:]
    handoff_id, offset = await opened(sender, receiver, num_blocks)
    other_id, other_offset = await opened(sender, receiver, 2)
    for first, end in ((0, 7), (7, 8), (8, num_blocks)):
        ids = source[first:end]
        save = Save(handoff_id, offset, num_blocks, (Part(first, ids),), end == num_blocks)
        values = {block_id: first + at for at, block_id in enumerate(ids)}
        saves, free = [save], [each for each in range(BLOCKS) if each not in shuffled]
        if end == num_blocks:
            # The second prompt of the same step.
            saves.append(Save(other_id, other_offset, 2, (Part(0, free[:2]),), True))
            values |= {free[0]: 50, free[1]: 51}
        sender.step(saves, compute=writes(values))
        # The next step uses the same blocks for something else.
        sender.step(compute=writes(dict.fromkeys(ids, 99)))
    await committed(receiver, handoff_id, other_id)
    loads = [Load(handoff_id, num_blocks * TOKENS, (Part(3, target[3:]),))]
    assert receiver.step(loads=loads) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at, block_id in enumerate(target):
            wanted = at + 100 * layer if at >= 3 else 0
            assert bool((cache[block_id] == wanted).all()), (layer, at)
    assert receiver.step(loads=[Load(other_id, 2 * TOKENS, (Part(0, [7, 5]),))]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        assert bool((cache[7] == 50 + 100 * layer).all())
        assert bool((cache[5] == 51 + 100 * layer).all())
    # The handoff was loaded once and released.
    assert receiver.step(loads=[Load(other_id, 2 * TOKENS, (Part(0, [7, 5]),))]) == {5, 7}
    await empty(sender)
    await empty(receiver)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sending", "receiving"), [(2, 2), (1, 4), (4, 1)])
async def test_a_shard_of_several_ranks_is_handed_over_once(tmp_path, device, sending, receiving):
    sides = []
    for number, num_ranks in enumerate((sending, receiving)):
        layout = dataclasses.replace(LAYOUT, tp_size=num_ranks, num_replicas=num_ranks)
        config = KvTransferConfig(send_bytes=2**22, receive_bytes=2**22)
        client = await TransferClient.start(config, str(tmp_path / f"{number}.sock"))
        await client.configure(layout.fingerprint())
        sides.append([Worker(client, device, range(4), n, layout) for n in range(num_ranks)])
    try:
        (sender, *_), (receiver, *_) = sides
        assert receiver.port.subscribe()
        handoff_id, offset = await opened(sender, receiver, 3)
        assert (await sender.client.stats()).send_bytes_used == 3 * LAYERS * BLOCK_BYTES
        save = Save(handoff_id, offset, 3, (Part(0, [9, 4, 6]),), True)
        for one in reversed(sides[0]):
            # A rank that does not send must not report that everything is filled.
            one.step([save], compute=writes({9: 0, 4: 1, 6: 2}))
        await committed(receiver, handoff_id)
        load = Load(handoff_id, 3 * TOKENS, (Part(0, [1, 3, 2]),))
        for one in sides[1]:
            assert one.step(loads=[load], releases=False) == set()
            for layer, cache in enumerate(one.caches.values()):
                for at, block_id in enumerate([1, 3, 2]):
                    assert bool((cache[block_id] == at + 100 * layer).all()), (layer, at)
        receiver.port.release(handoff_id, all_shards=True)
        await empty(sender)
        await empty(receiver)
    finally:
        for side in sides:
            for one in side:
                one.rank.close()
                one.port.close()
            await side[0].client.close()


@pytest.mark.parametrize("told", [(), (LAYERS - 1,), (0, 2)], ids=["none", "last", "some"])
async def test_layers_of_a_full_cuda_graph_are_handed_over(workers, told):
    sender, receiver = workers
    in_graph = {f"layer.{layer}" for layer in range(LAYERS) if layer not in told}
    handoff_id, offset = await opened(sender, receiver, 3)
    for first, ids, last in ((0, [9, 4], False), (2, [6], True)):
        save = Save(handoff_id, offset, 3, (Part(first, ids),), last)
        values = {block_id: first + at for at, block_id in enumerate(ids)}
        sender.step([save], compute=writes(values), in_graph=in_graph)
        # The next step uses the same blocks for something else, in the same graph.
        sender.step(compute=writes(dict.fromkeys(ids, 99)), in_graph=in_graph)
    await committed(receiver, handoff_id)
    assert receiver.step(loads=[Load(handoff_id, 3 * TOKENS, (Part(0, [1, 3, 2]),))]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at, block_id in enumerate([1, 3, 2]):
            assert bool((cache[block_id] == at + 100 * layer).all()), (layer, at)
    await empty(sender)
    await empty(receiver)


def alter_claimed(port, offset, monkeypatch):
    """Changes the byte at this offset of each handoff in staging as soon as it is claimed."""
    begin_claim = port.begin_claim

    def claim_and_alter(*args):
        pending = begin_claim(*args)
        assert pending.wait(10)
        port.memory[pending.claim.offset + offset] ^= 1
        return pending

    monkeypatch.setattr(port, "begin_claim", claim_and_alter)


async def test_a_wrong_byte_is_found_in_the_step_that_loads_it(workers, monkeypatch):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    save = Save(handoff_id, offset, 4, (Part(0, [4, 3, 2, 1]),), True)
    sender.step([save], compute=writes({1: 1, 2: 2, 3: 3, 4: 4}))
    await committed(receiver, handoff_id)
    alter_claimed(receiver.port, 2 * BLOCK_BYTES, monkeypatch)
    load = Load(handoff_id, 4 * TOKENS, (Part(1, [8, 7, 6]),))
    assert receiver.step(loads=[load]) == {6, 7, 8}
    assert receiver.step() == set()
    await empty(receiver)


async def test_a_wrong_byte_spoils_only_the_blocks_of_its_frame(workers, monkeypatch):
    """Frames of two steps follow each other in staging and are copied together."""
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    sender.step([Save(handoff_id, offset, 4, (Part(0, [4, 3]),), False)])
    sender.step([Save(handoff_id, offset, 4, (Part(2, [2, 1]),), True)])
    await committed(receiver, handoff_id)
    alter_claimed(receiver.port, 3 * BLOCK_BYTES, monkeypatch)
    load = Load(handoff_id, 4 * TOKENS, (Part(0, [8, 7, 6, 5]),))
    assert receiver.step(loads=[load]) == {6, 5}
    await empty(receiver)


async def test_an_incomplete_handoff_that_ends_leaves_nothing(workers):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    sender.step([Save(handoff_id, offset, 4, (Part(0, [4, 3]),), False)])
    sender.step(ended=[handoff_id])
    await empty(sender)
    await empty(receiver)


def stalling(rank, monkeypatch, *calls):
    """Makes the gathers of these numbers time out, as a bus that stands still does."""
    gather, number = rank._copies.gather, itertools.count()

    def gather_or_stall(*args):
        if next(number) in calls:
            raise TimeoutError("no copy to staging has ended in 5 s")
        return gather(*args)

    monkeypatch.setattr(rank._copies, "gather", gather_or_stall)


class TwoSlots(CpuDeviceCopies):
    """Copies through two pinned buffers, as for a GPU whose staging cannot be pinned."""

    finishes_at_once = False
    gathers_wait = True

    def __init__(self, cache, staging):
        super().__init__(cache, staging)
        self._free = threading.Semaphore(2)

    def gather(self, parts):
        if not self._free.acquire(timeout=20):
            raise TimeoutError("no copy to staging has ended in 20 s")
        super().gather(parts)
        return self

    def wait(self):
        self._free.release()


@pytest.fixture
async def bouncing_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_handoffs, "open_copies", TwoSlots)
    started = await start_workers(tmp_path, "cpu")
    yield started
    for worker in started:
        await worker.close()


async def test_a_step_with_more_gathers_than_buffers_gives_no_handoff_up(bouncing_workers):
    sender, receiver = bouncing_workers
    handoff_id, offset = await opened(sender, receiver, 2)
    assert LAYERS > 2
    save = Save(handoff_id, offset, 2, (Part(0, [6, 5]),), True)
    sender.step([save], compute=writes({5: 5, 6: 6}))
    await committed(receiver, handoff_id)
    loads = [Load(handoff_id, 2 * TOKENS, (Part(0, [7, 8]),))]
    assert receiver.step(loads=loads) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        assert bool((cache[7] == 6 + 100 * layer).all()), layer
        assert bool((cache[8] == 5 + 100 * layer).all()), layer


async def test_a_stalled_bus_fails_the_handoff_and_not_the_step(workers, monkeypatch):
    sender, receiver = workers
    broken_id, broken_at = await opened(sender, receiver, 4)
    whole_id, whole_at = await opened(sender, receiver, 2)
    # The second layer's gather stalls, or that of all layers. The rest comes in a later step.
    stalling(sender.rank, monkeypatch, 0 if sender.rank._copies.joined_bytes else 1)
    sender.step([Save(broken_id, broken_at, 4, (Part(0, [4, 3]),), False)])
    memory = sender.port.memory[broken_at : broken_at + 4 * LAYERS * BLOCK_BYTES]
    before = bytes(memory)
    sender.step(
        [
            Save(broken_id, broken_at, 4, (Part(2, [2, 1]),), True),
            Save(whole_id, whole_at, 2, (Part(0, [6, 5]),), True),
        ],
        compute=writes({1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6}),
    )
    # Its staging may belong to another handoff by now, so nothing is written there.
    assert bytes(memory) == before
    memory.release()
    await committed(receiver, whole_id)
    assert receiver.step(loads=[Load(whole_id, 2 * TOKENS, (Part(0, [7, 8]),))]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        assert bool((cache[7] == 6 + 100 * layer).all()), layer
        assert bool((cache[8] == 5 + 100 * layer).all()), layer
    await until_failed(sender)
    await empty(sender)
    await empty(receiver)


@pytest.mark.parametrize("workers", ["joined"], indirect=True)
async def test_a_stalled_gather_of_several_layers_fails_only_its_handoffs(workers, monkeypatch):
    sender, receiver = workers
    whole_id, whole_at = await opened(sender, receiver, 3)
    broken_id, broken_at = await opened(sender, receiver, 4)
    # A layer has seven blocks: five in the first gather, and two of the second handoff that wait
    # for the next layer.
    stalling(sender.rank, monkeypatch, 1)
    sender.step(
        [
            Save(whole_id, whole_at, 3, (Part(0, [1, 2, 3]),), True),
            Save(broken_id, broken_at, 4, (Part(0, [4, 5, 6, 7]),), True),
        ],
        compute=writes({block_id: block_id for block_id in range(1, 8)}),
    )
    await committed(receiver, whole_id)
    assert receiver.step(loads=[Load(whole_id, 3 * TOKENS, (Part(0, [11, 12, 13]),))]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at in (1, 2, 3):
            assert bool((cache[10 + at] == at + 100 * layer).all()), layer
    await until_failed(sender)
    await empty(sender)
    await empty(receiver)


async def test_a_rank_that_stalls_leaves_the_staging_to_the_other_rank(tmp_path, monkeypatch):
    layout = dataclasses.replace(LAYOUT, tp_size=2)
    sides = []
    for number in range(2):
        config = KvTransferConfig(send_bytes=2**22, receive_bytes=2**22)
        client = await TransferClient.start(config, str(tmp_path / f"{number}.sock"))
        await client.configure(layout.fingerprint())
        sides.append([Worker(client, "cpu", range(4), rank, layout) for rank in range(2)])
    try:
        (stalled, other), (receiver, _) = sides
        stalling(stalled.rank, monkeypatch, 0)
        handoff_id, offset = await opened(stalled, receiver, 4)
        first = Save(handoff_id, offset, 4, (Part(0, [4, 3]),), False)
        for one in (stalled, other):
            one.step([first])
        await until_failed(stalled)
        assert (await stalled.client.stats()).send_bytes_used == 8 * LAYERS * BLOCK_BYTES
        for one in (stalled, other):
            one.step([Save(handoff_id, offset, 4, (Part(2, [2, 1]),), True)])
        await empty(stalled)
        await empty(receiver)
    finally:
        for side in sides:
            for one in side:
                one.rank.close()
                one.port.close()
            await side[0].client.close()


async def until_failed(worker):
    async with asyncio.timeout(20):
        while not (await worker.client.stats()).handoffs_failed:
            await asyncio.sleep(0.01)


async def test_a_load_of_the_end_of_a_handoff_leaves_out_cached_blocks(workers):
    """The first two blocks are in the receiver's prefix cache."""
    sender, receiver = workers
    source = random.Random(5).sample(range(BLOCKS), 20)
    target = random.Random(6).sample(range(BLOCKS), 18)
    handoff_id, offset = await opened(sender, receiver, 20)
    sender.step(
        [Save(handoff_id, offset, 20, (Part(0, source),), True)],
        compute=writes({block: index + 1 for index, block in enumerate(source)}),
    )
    await committed(receiver, handoff_id)
    seen = {}

    def look(name, cache):
        seen[name] = cache.clone()

    wanted = Load(handoff_id, 20 * TOKENS, (Part(2, target),))
    assert receiver.step(loads=[wanted], compute=look) == set()
    # Every layer is loaded before the model runs.
    for name, cache in seen.items():
        layer = int(name.removeprefix("layer."))
        for index, block in enumerate(target, 3):
            assert (cache[block] == index + 100 * layer).all(), (name, index)
    await empty(receiver)


async def test_wrong_blocks_are_cleared_before_the_model_runs(workers):
    _, receiver = workers
    receiver.step(compute=writes(dict.fromkeys(range(20), 99)))
    seen = {}

    def look(name, cache):
        seen[name] = cache.clone()

    receiver.step(cleared=range(5, 12), compute=look)
    assert all((cache[5:12] == 0).all() and (cache[:5] != 0).all() for cache in seen.values())
    assert all((cache[12:20] != 0).all() for cache in seen.values())
