"""A handoff through the ranks' halves of two connectors and two real transfer services."""

import asyncio
import dataclasses
import random
import secrets

import pytest
import torch

from baton.kvtransfer.connector.early_loads import EarlyLoad, EarlyWork
from baton.kvtransfer.connector.handoff_step import HandoffStep, Load, Push
from baton.kvtransfer.connector.rank_half import RankHalf
from baton.kvtransfer.control import EnginePort, TransferClient
from baton.kvtransfer.layout import KvLayout
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
    """A service, and a rank beside it, whose cache it fills itself."""

    def __init__(self, client, device, order, rank=0, layout=LAYOUT):
        self.client = client
        self.port = EnginePort(client.socket_path)
        self.rank = RankHalf(client.socket_path, self.port, rank, layout)
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16, device=device)
        back = [order.index(axis) for axis in range(4)]
        self.caches = {f"layer.{index}": memory.clone().permute(back) for index in range(LAYERS)}
        self.rank.register(self.caches)

    def step(
        self, pushes=(), loads=(), ended=(), compute=None, early=None, in_graph=(), releases=True
    ):
        """As vLLM's model runner makes one; returns the invalid block ids.

        Args:
            in_graph: layers that a CUDA graph computes without telling the connector.
            releases: whether what was loaded is, by all ranks.
        """
        early = early or EarlyWork()
        metadata = HandoffStep(list(pushes), list(loads), list(ended), early)
        self.rank.begin_step(metadata)
        if loads:
            self.rank.load(metadata)
        for name, cache in self.caches.items():
            if compute is not None:
                compute(name, cache)
            if name not in in_graph:
                self.rank.save(name)
        if not loads:
            # Where the step's model needs nothing of them, they follow it.
            self.rank.load(metadata)
        self.rank.end_step()
        invalid = self.rank.take_invalid_block_ids()
        # By handoff, of those whose early load a load took over.
        self.num_early = self.rank.take_report().num_early_blocks
        for load in loads if releases else ():
            # The scheduler's half does, once the step is over.
            self.port.release(load.handoff_id, all_ranks=True)
        return invalid

    async def close(self):
        self.rank.close()
        self.port.close()
        await self.client.close()


@pytest.fixture(params=DEVICES)
async def workers(request, tmp_path):
    started = []
    # The receiver's memory is laid out differently.
    for number, order in enumerate([(0, 1, 2, 3), (0, 2, 1, 3)]):
        config = KvTransferConfig(send_bytes=2**22, receive_bytes=2**22)
        client = await TransferClient.start(config, str(tmp_path / f"{number}.sock"))
        await client.configure(LAYOUT.fingerprint())
        started.append(Worker(client, request.param, order))
    assert started[1].port.subscribe()
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
    """Computes blocks of each layer: a number of their own for each."""

    def compute(name, cache):
        layer = int(name.removeprefix("layer."))
        for block_id, value in values.items():
            cache[block_id] = value + 100 * layer

    return compute


async def test_what_was_computed_in_steps_is_loaded_in_another_order(workers):
    sender, receiver = workers
    num_blocks = 20
    shuffled = random.Random(3).sample(range(BLOCKS), 2 * num_blocks)
    source, target = shuffled[:num_blocks], shuffled[num_blocks:]
    handoff_id, offset = await opened(sender, receiver, num_blocks)
    other_id, other_offset = await opened(sender, receiver, 2)
    for first, end in ((0, 7), (7, 8), (8, num_blocks)):
        ids = source[first:end]
        push = Push(handoff_id, offset, first, num_blocks, ids, end == num_blocks)
        values = {block_id: first + at for at, block_id in enumerate(ids)}
        pushes, free = [push], [each for each in range(BLOCKS) if each not in shuffled]
        if end == num_blocks:
            # A second prompt of the same step.
            pushes.append(Push(other_id, other_offset, 0, 2, free[:2], True))
            values |= {free[0]: 50, free[1]: 51}
        sender.step(pushes, compute=writes(values))
        # The next step uses the same blocks for something else.
        sender.step(compute=writes(dict.fromkeys(ids, 99)))
    await committed(receiver, handoff_id, other_id)
    loads = [Load(handoff_id, num_blocks * TOKENS, 3, target[3:])]
    assert receiver.step(loads=loads) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at, block_id in enumerate(target):
            wanted = at + 100 * layer if at >= 3 else 0
            assert bool((cache[block_id] == wanted).all()), (layer, at)
    assert receiver.step(loads=[Load(other_id, 2 * TOKENS, 0, [7, 5])]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        assert bool((cache[7] == 50 + 100 * layer).all())
        assert bool((cache[5] == 51 + 100 * layer).all())
    # Loaded once and released.
    assert receiver.step(loads=[Load(other_id, 2 * TOKENS, 0, [7, 5])]) == {5, 7}
    await empty(sender)
    await empty(receiver)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("sending", "receiving"), [(2, 2), (1, 4), (4, 1)])
async def test_what_several_ranks_hold_is_handed_over_once(tmp_path, device, sending, receiving):
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
        push = Push(handoff_id, offset, 0, 3, [9, 4, 6], True)
        for one in reversed(sides[0]):
            # Where the first of them does not send, others must not say that all is filled.
            one.step([push], compute=writes({9: 0, 4: 1, 6: 2}))
        await committed(receiver, handoff_id)
        load = Load(handoff_id, 3 * TOKENS, 0, [1, 3, 2])
        for one in sides[1]:
            assert one.step(loads=[load], releases=False) == set()
            for layer, cache in enumerate(one.caches.values()):
                for at, block_id in enumerate([1, 3, 2]):
                    assert bool((cache[block_id] == at + 100 * layer).all()), (layer, at)
        receiver.port.release(handoff_id, all_ranks=True)
        await empty(sender)
        await empty(receiver)
    finally:
        for side in sides:
            for one in side:
                one.rank.close()
                one.port.close()
            await side[0].client.close()


@pytest.mark.parametrize("told", [(), (LAYERS - 1,), (0, 2)], ids=["none", "last", "some"])
async def test_layers_that_a_graph_computes_silently_are_handed_over_too(workers, told):
    sender, receiver = workers
    in_graph = {f"layer.{layer}" for layer in range(LAYERS) if layer not in told}
    handoff_id, offset = await opened(sender, receiver, 3)
    for first, ids, last in ((0, [9, 4], False), (2, [6], True)):
        push = Push(handoff_id, offset, first, 3, ids, last)
        values = {block_id: first + at for at, block_id in enumerate(ids)}
        sender.step([push], compute=writes(values), in_graph=in_graph)
        # The next step uses the same blocks for something else, in the same graph.
        sender.step(compute=writes(dict.fromkeys(ids, 99)), in_graph=in_graph)
    await committed(receiver, handoff_id)
    assert receiver.step(loads=[Load(handoff_id, 3 * TOKENS, 0, [1, 3, 2])]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at, block_id in enumerate([1, 3, 2]):
            assert bool((cache[block_id] == at + 100 * layer).all()), (layer, at)
    await empty(sender)
    await empty(receiver)


async def test_a_wrong_byte_is_found_by_the_step_that_loads_it(workers, monkeypatch):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    push = Push(handoff_id, offset, 0, 4, [4, 3, 2, 1], True)
    sender.step([push], compute=writes({1: 1, 2: 2, 3: 3, 4: 4}))
    await committed(receiver, handoff_id)
    claim = receiver.port.claim

    def claim_and_alter(*args):
        claimed = claim(*args)
        receiver.port.memory[claimed.offset + 2 * BLOCK_BYTES] ^= 1
        return claimed

    monkeypatch.setattr(receiver.port, "claim", claim_and_alter)
    load = Load(handoff_id, 4 * TOKENS, 1, [8, 7, 6])
    assert receiver.step(loads=[load]) == {6, 7, 8}
    assert receiver.step() == set()
    await empty(receiver)


async def test_an_incomplete_handoff_that_ends_leaves_nothing(workers):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    sender.step([Push(handoff_id, offset, 0, 4, [4, 3], False)])
    sender.step(ended=[handoff_id])
    await empty(sender)
    await empty(receiver)


async def granted(worker, handoff_id):
    """Claims it ahead, and waits for the claims that come with the commit."""
    assert worker.port.claim_ahead(handoff_id)
    claims = []

    def are_there():
        for state in worker.port.poll():
            if state.handoff_id == handoff_id:
                claims.extend(claim.SerializeToString() for claim in state.claims)
        return bool(claims)

    await until(are_there)
    return claims


async def received(worker, handoff_id, num_blocks):
    """Waits until so many blocks of every layer have come, and says which epoch they are of."""

    def are_there():
        nonlocal seen
        seen = worker.port.peek(handoff_id, 0, 0, 0)
        return seen is not None and sum(frame.num_blocks for frame in seen.frames) == (
            LAYERS * num_blocks
        )

    seen = None
    await until(are_there)
    return seen


async def half_sent(sender, receiver):
    """A handoff of 20 blocks of which 12 have come: (id, its bytes' offset, sender's blocks)."""
    source = random.Random(5).sample(range(BLOCKS), 20)
    handoff_id, offset = await opened(sender, receiver, 20)
    sender.step(
        [Push(handoff_id, offset, 0, 20, source[:12], False)],
        compute=writes({block: index + 1 for index, block in enumerate(source)}),
    )
    return handoff_id, offset, source


async def loaded_early(workers, first_block, target):
    """A handoff that is sent whole, of which what came first was loaded early; its id."""
    sender, receiver = workers
    handoff_id, offset, source = await half_sent(sender, receiver)
    await received(receiver, handoff_id, 12)
    load = EarlyLoad(handoff_id, 20 * TOKENS, first_block, target)
    receiver.step(early=EarlyWork(begun=[load], arrived=[handoff_id]))
    sender.step([Push(handoff_id, offset, 12, 20, source[12:], True)])
    return handoff_id


def assert_loaded(worker, target, first_block):
    """The blocks of a handoff that was half sent, from one on, are where they were to go."""
    for name, cache in worker.caches.items():
        layer = int(name.removeprefix("layer."))
        for index, block in enumerate(target, first_block + 1):
            assert (cache[block] == index + 100 * layer).all(), (name, index)


async def test_what_arrives_is_loaded_before_the_rest_is_there(workers):
    sender, receiver = workers
    handoff_id, offset, source = await half_sent(sender, receiver)
    await received(receiver, handoff_id, 12)
    # The first two blocks are in the receiver's prefix cache, and the last is not whole.
    target = random.Random(6).sample(range(BLOCKS), 18)
    load = EarlyLoad(handoff_id, 20 * TOKENS, 2, target)
    receiver.step(early=EarlyWork(begun=[load], arrived=[handoff_id]))
    assert_loaded(receiver, target[:10], 2)
    sender.step([Push(handoff_id, offset, 12, 20, source[12:], True)])
    claims = await granted(receiver, handoff_id)
    # Nobody takes it away under the load.
    receiver.client.drop(handoff_id)
    # By now the prefix cache has a third. What is there already is not read again.
    claimed = pb.LocalClaimed.FromString(claims[0])
    first_bytes = slice(claimed.offset, claimed.offset + 12 * BLOCK_BYTES)
    receiver.port.memory[first_bytes] = bytes(12 * BLOCK_BYTES)
    seen = {}

    def look(name, cache):
        seen[name] = cache.clone()

    wanted = Load(handoff_id, 20 * TOKENS, 3, target[1:], claims, is_early=True)
    assert receiver.step(loads=[wanted], compute=look) == set()
    # All of it is there before the model runs.
    receiver.caches, caches = seen, receiver.caches
    assert_loaded(receiver, target, 2)
    receiver.caches = caches
    assert receiver.num_early == {handoff_id: 9}
    await empty(receiver)


@pytest.mark.parametrize("change", ["not early", "other blocks", "begins before", "over"])
async def test_a_load_that_goes_elsewhere_comes_whole(workers, change):
    _, receiver = workers
    handoff_id = await loaded_early(workers, 1, list(range(1, 20)))
    claims = await granted(receiver, handoff_id)
    # Somebody else has had the blocks.
    over = EarlyWork(over=[handoff_id] if change == "over" else [])
    receiver.step(early=over, compute=writes(dict.fromkeys(range(20), 99)))
    first = 0 if change == "begins before" else 1
    target = list(range(first, 20))
    if change == "other blocks":
        target.reverse()
    is_early = change != "not early"
    wanted = Load(handoff_id, 20 * TOKENS, first, target, claims, is_early)
    assert receiver.step(loads=[wanted]) == set()
    assert_loaded(receiver, target, first)
    assert not any(receiver.num_early.values())
    await empty(receiver)


async def test_a_load_without_claims_takes_over_what_came_early(workers):
    _, receiver = workers
    target = list(range(20))
    handoff_id = await loaded_early(workers, 0, target)
    await committed(receiver, handoff_id)
    receiver.step(early=EarlyWork(arrived=[handoff_id]))
    wanted = Load(handoff_id, 20 * TOKENS, 0, target, is_early=True)
    assert receiver.step(loads=[wanted]) == set()
    assert_loaded(receiver, target, 0)
    assert receiver.num_early == {handoff_id: 20}
    # Once: the same blocks are somebody else's after that.
    assert receiver.step(loads=[wanted]) == set(target)
    await empty(receiver)


async def test_altered_staging_is_not_taken_for_loaded(workers):
    sender, receiver = workers
    handoff_id, offset, source = await half_sent(sender, receiver)
    seen = await received(receiver, handoff_id, 12)
    at = seen.offset + 5 * BLOCK_BYTES
    receiver.port.memory[at] ^= 0xFF
    target = list(range(20))
    load = EarlyLoad(handoff_id, 20 * TOKENS, 0, target)
    receiver.step(early=EarlyWork(begun=[load], arrived=[handoff_id]))
    sender.step([Push(handoff_id, offset, 12, 20, source[12:], True)])
    claims = await granted(receiver, handoff_id)
    wanted = Load(handoff_id, 20 * TOKENS, 0, target, claims, is_early=True)
    assert 5 in receiver.step(loads=[wanted])
    await empty(receiver)


async def test_what_is_missing_and_altered_is_told(workers):
    _, receiver = workers
    target = list(range(20))
    handoff_id = await loaded_early(workers, 0, target)
    claims = await granted(receiver, handoff_id)
    receiver.port.memory[pb.LocalClaimed.FromString(claims[0]).offset + 15 * BLOCK_BYTES] ^= 0xFF
    wanted = Load(handoff_id, 20 * TOKENS, 0, target, claims, is_early=True)
    invalid = receiver.step(loads=[wanted])
    assert 15 in invalid
    # Whoever gets them next finds nothing of it.
    assert all((receiver.caches["layer.0"][block] == 0).all() for block in invalid)
    assert receiver.step() == set()
    await empty(receiver)


async def test_an_early_load_that_is_over_copies_nothing_more(workers):
    _, receiver = workers
    handoff_id = await loaded_early(workers, 0, list(range(20)))
    await committed(receiver, handoff_id)
    work = EarlyWork(arrived=[handoff_id], over=[handoff_id], cleared=list(range(5, 12)))
    seen = {}

    def look(name, cache):
        seen[name] = cache.clone()

    receiver.step(early=work, compute=look)
    # Before the model runs, which may use them.
    assert all((cache[5:12] == 0).all() and (cache[:5] != 0).all() for cache in seen.values())
    assert all((cache[12:20] == 0).all() for cache in receiver.caches.values())
    assert receiver.port.release(handoff_id, all_ranks=True)
    await empty(receiver)
