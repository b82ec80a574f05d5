"""A handoff through the ranks' halves of two connectors and two real transfer services."""

import asyncio
import functools
import importlib
import random
import secrets
import warnings

import pytest
import torch

from baton.kvtransfer.control import EnginePort, TransferClient
from baton.kvtransfer.layout import KvLayout
from baton.runtime.config import KvTransferConfig
from baton.v1 import kv_transfer_pb2 as pb


@functools.cache
def connector():
    """The module under test, once: vLLM takes seconds to import, and warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("baton.kvtransfer.vllm_connector")


def push_of(*args):
    return connector().Push(*args)


def load_of(*args):
    return connector().Load(*args)


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
    """A service, and the only rank beside it, whose cache it fills itself."""

    def __init__(self, client, device, order):
        self.client = client
        self.port = EnginePort(client.socket_path)
        self.rank = connector()._RankHalf(client.socket_path, self.port, LAYOUT)
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        memory = torch.zeros([shape[axis] for axis in order], dtype=torch.bfloat16, device=device)
        back = [order.index(axis) for axis in range(4)]
        self.caches = {f"layer.{index}": memory.clone().permute(back) for index in range(LAYERS)}
        self.rank.register(self.caches)

    def step(self, pushes=(), loads=(), ended=(), compute=None):
        """As vLLM's model runner makes one; returns the invalid block ids."""
        metadata = connector().StepMetadata(list(pushes), list(loads), list(ended))
        self.rank.begin_step(metadata)
        self.rank.load(metadata)
        for name, cache in self.caches.items():
            if compute is not None:
                compute(name, cache)
            self.rank.save(name)
        self.rank.end_step()
        return self.rank.take_invalid_block_ids()

    async def close(self):
        self.rank.close()
        self.port.close()
        await self.client.close()


@pytest.fixture(params=DEVICES)
async def workers(request, tmp_path, monkeypatch):
    monkeypatch.setattr(connector(), "get_tensor_model_parallel_rank", lambda: 0)
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
        push = push_of(handoff_id, offset, first, num_blocks, ids, end == num_blocks)
        values = {block_id: first + at for at, block_id in enumerate(ids)}
        pushes, free = [push], [each for each in range(BLOCKS) if each not in shuffled]
        if end == num_blocks:
            # A second prompt of the same step.
            pushes.append(push_of(other_id, other_offset, 0, 2, free[:2], True))
            values |= {free[0]: 50, free[1]: 51}
        sender.step(pushes, compute=writes(values))
        # The next step uses the same blocks for something else.
        sender.step(compute=writes(dict.fromkeys(ids, 99)))
    await committed(receiver, handoff_id, other_id)
    loads = [load_of(handoff_id, num_blocks * TOKENS, 3, target[3:])]
    assert receiver.step(loads=loads) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        for at, block_id in enumerate(target):
            wanted = at + 100 * layer if at >= 3 else 0
            assert bool((cache[block_id] == wanted).all()), (layer, at)
    assert receiver.step(loads=[load_of(other_id, 2 * TOKENS, 0, [7, 5])]) == set()
    for layer, cache in enumerate(receiver.caches.values()):
        assert bool((cache[7] == 50 + 100 * layer).all())
        assert bool((cache[5] == 51 + 100 * layer).all())
    # Loaded once and released.
    assert receiver.step(loads=[load_of(other_id, 2 * TOKENS, 0, [7, 5])]) == {5, 7}
    await empty(sender)
    await empty(receiver)


async def test_a_wrong_byte_is_found_by_the_step_that_loads_it(workers, monkeypatch):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    push = push_of(handoff_id, offset, 0, 4, [4, 3, 2, 1], True)
    sender.step([push], compute=writes({1: 1, 2: 2, 3: 3, 4: 4}))
    await committed(receiver, handoff_id)
    claim = receiver.port.claim

    def claim_and_alter(*args):
        claimed = claim(*args)
        receiver.port.memory[claimed.offset + 2 * BLOCK_BYTES] ^= 1
        return claimed

    monkeypatch.setattr(receiver.port, "claim", claim_and_alter)
    load = load_of(handoff_id, 4 * TOKENS, 1, [8, 7, 6])
    assert receiver.step(loads=[load]) == {6, 7, 8}
    assert receiver.step() == set()
    await empty(receiver)


async def test_an_incomplete_handoff_that_ends_leaves_nothing(workers):
    sender, receiver = workers
    handoff_id, offset = await opened(sender, receiver, 4)
    sender.step([push_of(handoff_id, offset, 0, 4, [4, 3], False)])
    sender.step(ended=[handoff_id])
    await empty(sender)
    await empty(receiver)
