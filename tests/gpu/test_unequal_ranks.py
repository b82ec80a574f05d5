"""Handoffs between workers of different numbers of ranks and of pipeline stages.

The reference is the cache of all heads and layers: each rank holds a range of heads, in the layers
of its stage.
"""

import asyncio
import dataclasses
import itertools
import mmap
import secrets

import pytest
import torch

from baton.kvtransfer.connector.handoffs.block_copies import LayerRun, Run
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies
from baton.kvtransfer.connector.handoffs.cuda_device_copies import CudaDeviceCopies
from baton.kvtransfer.connector.handoffs.handoff_step import HandoffStep, Load, Part, Save
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.head_ranges import head_ranges
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.pipeline_stages import PipelineStage
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import KvTransferConfig
from baton.runtime.kv.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2 as pb

BLOCKS, CONTENT = 32, 16
SIZE = {"send_bytes": 2**20, "receive_bytes": 2**20}
# In memory: blocks, heads, tokens, content, or tokens before heads.
HEADS_FIRST, TOKENS_FIRST = (0, 1, 2, 3), (0, 2, 1, 3)
# Number of heads of all ranks.
ONE_GROUP = [KvGroup("full", 3, 4, 4, 4 * 4 * CONTENT)]
# A group with another number of heads, in a block table of its own.
TWO_GROUPS = [
    KvGroup("full", 2, 4, 4, 4 * 4 * CONTENT),
    KvGroup("window", 2, 8, 8, 8 * 8 * CONTENT, window_tokens=20, table=1),
]
WINDOWS = [KvGroup("window", 3, 4, 4, 4 * 4 * CONTENT, window_tokens=20)]
DRAFTED = [ONE_GROUP[0], KvGroup("full", 1, 4, 4, 4 * 4 * CONTENT, is_draft=True)]
SIX_HEADS = [KvGroup("full", 2, 6, 4, 6 * 4 * CONTENT)]
# A recurrent state counts as one token; each of two ranks has its own.
STATES = [ONE_GROUP[0], KvGroup("state", 3, 2, 8, 2 * CONTENT, table=1)]
ONLY_STATES = [KvGroup("state", 3, 2, 8, 2 * CONTENT)]
# Every rank of a stage holds the whole latents.
LATENTS = [KvGroup("full", 3, 1, 4, 4 * CONTENT)]
CASES = {
    "1 to 2": (1, 2, ONE_GROUP),
    "2 to 1": (2, 1, ONE_GROUP),
    "2 to 4": (2, 4, ONE_GROUP),
    "4 to 2": (4, 2, ONE_GROUP),
    "1 to 4": (1, 4, ONE_GROUP),
    # Neighbouring ranks hold the same head.
    "2 to 8, replicas": (2, 8, ONE_GROUP),
    "8 to 2, replicas": (8, 2, ONE_GROUP),
    "8 to 4, replicas": (8, 4, ONE_GROUP),
    # A rank takes a part of two shards.
    "2 to 3": (2, 3, SIX_HEADS),
    "3 to 2": (3, 2, SIX_HEADS),
    "1 to 2, windows": (1, 2, WINDOWS),
    "4 to 2, windows": (4, 2, WINDOWS),
    "1 to 2, draft": (1, 2, DRAFTED),
    "2 to 1, draft": (2, 1, DRAFTED),
    "2 to 4, two groups": (2, 4, TWO_GROUPS),
    "4 to 1, two groups": (4, 1, TWO_GROUPS),
    # Ranks of each of several pipeline stages.
    "1 to 1x2": (1, (1, 2), ONE_GROUP),
    "1x2 to 1": ((1, 2), 1, ONE_GROUP),
    "1x2 to 1x3": ((1, 2), (1, 3), ONE_GROUP),
    "1x2 to 1x3, windows": ((1, 2), (1, 3), WINDOWS),
    "2x2 to 2x2": ((2, 2), (2, 2), ONE_GROUP),
    "2x2 to 4": ((2, 2), 4, ONE_GROUP),
    "2 to 4x3": (2, (4, 3), ONE_GROUP),
    "8x2 to 2x3, replicas": ((8, 2), (2, 3), ONE_GROUP),
    "1x3 to 2x2, two groups": ((1, 3), (2, 2), TWO_GROUPS),
    "4x2 to 1x3, two groups": ((4, 2), (1, 3), TWO_GROUPS),
    "2x2 to 2, states": ((2, 2), 2, STATES),
    "2 to 2x3, states": (2, (2, 3), STATES),
    "2 to 2, only states": (2, 2, ONLY_STATES),
    "2x3 to 2, only states": ((2, 3), 2, ONLY_STATES),
    "2x3 to 1x2, latents": ((2, 3), (1, 2), LATENTS),
    "1 to 2x2, latents": (1, (2, 2), LATENTS),
}
# Kinds of models, as the table of docs/models.md names them, whose caches have such groups.
KINDS = [
    (ONE_GROUP, ["llama", "fp8"]),
    (WINDOWS, ["all windowed"]),
    (TWO_GROUPS, ["gpt-oss", "two sizes"]),
    (STATES, ["recurrent", "nemotron", "granite", "falcon"]),
    (ONLY_STATES, ["mamba"]),
    (LATENTS, ["latent"]),
    (DRAFTED, ["eagle"]),
]
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


def proven(case):
    """Returns a case as a parameter that proves something of the kinds with its groups."""
    *sizes, groups = CASES[case]
    has_stages = any(isinstance(size, tuple) for size in sizes)
    # All cases of states have two ranks.
    abilities = {"stages"} if has_stages else {"ranks"}
    abilities |= {"ranks"} if groups is STATES else set()
    kinds = [kind for of, names in KINDS if of is groups for kind in names]
    marks = [pytest.mark.proves(what, "layout", kind=kind) for what in abilities for kind in kinds]
    return pytest.param(case, marks=marks)


def layout_of(groups, size):
    """Returns the layout of a worker's ranks.

    Args:
        groups: The groups with all heads.
        size: Number of ranks, or of ranks of each stage and of stages.
    """
    num_ranks, num_stages = size if isinstance(size, tuple) else (size, 1)
    num_shards = min(num_ranks, groups[0].num_kv_heads)
    of_rank = [
        dataclasses.replace(
            group,
            num_kv_heads=group.num_kv_heads // num_shards,
            block_bytes=group.block_bytes // num_shards,
        )
        for group in groups
    ]
    first = of_rank[0]
    made = KvLayout(
        "m", "r", "uint8", first.num_layers, first.num_kv_heads, CONTENT // 2,
        first.block_size_tokens, first.block_bytes, "heads,tokens,content",
        tp_size=num_ranks, num_replicas=num_ranks // num_shards, pp_size=num_stages,
        draft_revision="eagle" if groups is DRAFTED else "",
    )  # fmt: skip
    return made.with_groups(of_rank)


class Worker:
    """A transfer service with all ranks beside it, and the cache of all heads for comparison."""

    def __init__(self, client, device, order, layout, groups, kernel_tokens):
        self.client, self.layout = client, layout
        self.ports = [EnginePort(client.socket_path) for _ in range(layout.num_ranks)]
        self.ranks, self.caches, self.places = [], [], []
        # For each layer all heads of all blocks, with other bytes in every place.
        self.whole = [
            torch.randint(256, (BLOCKS, group.num_kv_heads, tokens_of(group), CONTENT)).to(
                torch.uint8
            )
            for group in groups
            for _ in range(group.num_layers)
        ]
        for number, port in enumerate(self.ports):
            index, rank = divmod(number, layout.tp_size)
            # Stages hold neighbouring layers of a model, in which layers of groups alternate.
            stage = PipelineStage(index, range(index, layout.num_all_layers, layout.pp_size))
            rank_handoffs = RankHandoffs(client.socket_path, port, rank, layout, stage)
            caches = {
                f"layer.{layer}": paged(
                    self.heads_of(rank, layer),
                    order,
                    kernel_tokens if layout.group_of(layer).kind != "state" else 0,
                    device,
                )
                for layer in stage.layers
            }
            rank_handoffs.register(caches)
            self.ranks.append(rank_handoffs)
            self.caches.append(caches)
            self.places.append((rank, stage.layers))

    def heads_of(self, rank, layer):
        """Returns a rank's heads of a layer, by the reference."""
        shard, heads = rank // self.layout.num_replicas, self.layout.group_of(layer).num_kv_heads
        return self.whole[layer][:, shard * heads : (shard + 1) * heads]

    def check(self):
        """Compares the caches of all ranks with the reference."""
        for (rank, layers), caches in zip(self.places, self.caches, strict=True):
            for layer, cache in zip(layers, caches.values(), strict=True):
                wanted = self.heads_of(rank, layer)
                parts = wanted.shape[2] // cache.shape[2]
                blocks = cache.unflatten(0, (BLOCKS, parts)).transpose(1, 2).flatten(2, 3)
                assert torch.equal(blocks.cpu(), wanted), (rank, layer)

    def step(self, saves=(), loads=()):
        """Makes a step of all ranks; returns the invalid block IDs of each rank."""
        step, invalid = HandoffStep(list(saves), list(loads)), []
        for rank_handoffs, caches in zip(self.ranks, self.caches, strict=True):
            rank_handoffs.begin_step(step)
            rank_handoffs.load(step)
            for name in caches:
                rank_handoffs.save(name)
            rank_handoffs.end_step()
            invalid.append(rank_handoffs.take_invalid_block_ids())
        self.failed = [rank_handoffs.take_report().failed for rank_handoffs in self.ranks]
        return invalid

    async def close(self):
        for rank_handoffs, port in zip(self.ranks, self.ports, strict=True):
            rank_handoffs.close()
            port.close()
        await self.client.close()


def tokens_of(group):
    return group.block_size_tokens if group.kind != "state" else 1


def paged(blocks, order, kernel_tokens, device):
    """Returns blocks as an engine keeps them, maybe cut into smaller blocks of its kernel."""
    if kernel_tokens:
        parts = blocks.shape[2] // kernel_tokens
        blocks = blocks.unflatten(2, (parts, kernel_tokens)).transpose(1, 2).flatten(0, 1)
    back = [order.index(axis) for axis in range(4)]
    return blocks.permute(order).contiguous().to(device).permute(back)


class Pair:
    """Starts a sender and a receiver of different sizes."""

    def __init__(self, directory, device):
        self.directory, self.device, self.started = directory, device, []

    async def start(self, case, orders=(HEADS_FIRST, TOKENS_FIRST), kernel_tokens=0, **config):
        *sizes, groups = CASES[case]
        for size, order in zip(sizes, orders, strict=True):
            layout = layout_of(groups, size)
            socket_path = str(self.directory / f"{len(self.started)}.sock")
            client = await TransferClient.start(KvTransferConfig(**SIZE, **config), socket_path)
            await client.configure(layout.fingerprint())
            self.started.append(Worker(client, self.device, order, layout, groups, kernel_tokens))
        assert self.started[1].ports[0].subscribe()
        return self.started


@pytest.fixture(params=DEVICES)
async def pair(request, tmp_path):
    made = Pair(tmp_path, request.param)
    yield made
    for worker in made.started:
        await worker.close()


async def sent(sender, receiver, tables, num_tokens, steps=2):
    """Hands over blocks of each table in several steps; returns the committed state."""
    layout, handoff_id = sender.layout, secrets.token_bytes(16)
    num_blocks = layout.num_blocks(num_tokens)
    offset = await sender.client.open_send(
        handoff_id, receiver.client.address, num_blocks, num_tokens, 30.0
    )
    held = [layout.blocks(table, num_blocks) for table in layout.tables]
    for number in range(steps):
        parts = []
        for blocks, ids in zip(held, tables, strict=True):
            first, end = (len(blocks) * at // steps for at in (number, number + 1))
            parts.append(Part(blocks[0] + first, ids[first:end]))
        sender.step([Save(handoff_id, offset, num_blocks, tuple(parts), number == steps - 1)])
    async with asyncio.timeout(30):
        while True:
            for state in receiver.ports[0].poll():
                assert state.state != pb.HANDOFF_STATE_FAILED, state
                if state.state == pb.HANDOFF_STATE_COMMITTED:
                    assert state.num_shards == layout.num_shards
                    return state
            await asyncio.sleep(0.01)


async def nothing_left(*workers):
    async with asyncio.timeout(30):
        for worker in workers:
            while True:
                stats = await worker.client.stats()
                if stats.send_bytes_used + stats.receive_bytes_used == 0:
                    break
                await asyncio.sleep(0.01)


def chosen(layout, num_blocks, seed):
    """Returns for each block table as many block IDs as a handoff of this size holds."""
    ids = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    taken = iter(ids)
    return [
        list(itertools.islice(taken, len(layout.blocks(table, num_blocks))))
        for table in layout.tables
    ]


async def hand_over(sender, receiver, num_tokens, num_cached_blocks=0):
    """Hands over a prompt, and changes the receiver's reference likewise."""
    num_blocks = sender.layout.num_blocks(num_tokens)
    source = chosen(sender.layout, num_blocks, 1)
    target = chosen(receiver.layout, num_blocks, 2)
    state = await sent(sender, receiver, source, num_tokens)
    parts = []
    for table, ids in zip(receiver.layout.tables, target, strict=True):
        skipped = num_cached_blocks if table.table == 0 else 0
        first = receiver.layout.blocks(table, num_blocks)[0]
        parts.append(Part(first + skipped, ids[skipped:]))
    for layer, whole in enumerate(receiver.whole):
        table = receiver.layout.group_of(layer).table
        skipped = num_cached_blocks if table == 0 else 0
        for one, other in zip(source[table][skipped:], target[table][skipped:], strict=True):
            whole[other] = sender.whole[layer][one]
    return Load(
        state.handoff_id,
        num_tokens,
        tuple(parts),
        num_shards=state.num_shards,
        has_draft=bool(sender.layout.draft_groups),
    )


@pytest.mark.parametrize("case", [proven(case) for case in CASES])
async def test_every_rank_gets_its_heads(pair, case):
    sender, receiver = await pair.start(case)
    load = await hand_over(sender, receiver, 50)
    assert receiver.step(loads=[load]) == [set()] * receiver.layout.num_ranks
    sender.check()
    receiver.check()
    receiver.ports[0].release(load.handoff_id, all_shards=True)
    await nothing_left(sender, receiver)


@pytest.mark.parametrize("case", ["1 to 2", "4 to 2", "2 to 3"])
@pytest.mark.parametrize("orders", [*itertools.product([HEADS_FIRST, TOKENS_FIRST], repeat=2)])
@pytest.mark.parametrize("kernel_tokens", [0, 2])
async def test_any_memory_layout(pair, case, orders, kernel_tokens):
    sender, receiver = await pair.start(case, orders, kernel_tokens)
    load = await hand_over(sender, receiver, 42)
    assert receiver.step(loads=[load]) == [set()] * receiver.layout.num_ranks
    receiver.check()


@pytest.mark.parametrize("case", ["1 to 2", "2 to 1", "1x2 to 1x3"])
async def test_cached_blocks_are_left_out(pair, case):
    sender, receiver = await pair.start(case, transports=["grpc"])
    load = await hand_over(sender, receiver, 50, num_cached_blocks=3)
    assert receiver.step(loads=[load]) == [set()] * receiver.layout.num_ranks
    receiver.check()


@pytest.mark.parametrize("case", ["1 to 2", "4 to 2", "1 to 1x2"])
async def test_a_wrong_byte_of_any_shard_is_found(pair, case):
    sender, receiver = await pair.start(case)
    load = await hand_over(sender, receiver, 50)
    # The last byte of the handoff belongs to the last rank that has the last layer.
    used = (await receiver.client.stats()).receive_bytes_used
    port = receiver.ports[-1]
    description = port.description
    port.memory[description.send_bytes + used - 1] ^= 1
    invalid = receiver.step(loads=[load])
    last = max(
        number
        for number, (_, layers) in enumerate(receiver.places)
        if receiver.layout.num_layers - 1 in layers
    )
    assert invalid[last]
    assert receiver.failed[last] == {load.handoff_id: pb.REFUSAL_REASON_CHECKSUM}


@pytest.mark.parametrize("case", ["1 to 2", "4 to 2", "1x2 to 1x3"])
async def test_a_request_waits_for_the_heads_of_all_shards(pair, case):
    sender, receiver = await pair.start(case)
    load = dataclasses.replace(await hand_over(sender, receiver, 50), waiting_id="request")
    assert receiver.step(loads=[load]) == [set()] * receiver.layout.num_ranks
    ended = [set() for _ in receiver.ranks]
    async with asyncio.timeout(30):
        while not all(ended):
            for rank_handoffs, found in zip(receiver.ranks, ended, strict=True):
                # On a CPU, each step copies a part.
                rank_handoffs.copy_waited(4096)
                done, failed = rank_handoffs.take_ended()
                assert not failed
                found |= done
            await asyncio.sleep(0.01)
    assert ended == [{"request"}] * receiver.layout.num_ranks
    receiver.check()


async def test_a_load_of_another_length_is_refused(pair):
    sender, receiver = await pair.start("2 to 1")
    load = await hand_over(sender, receiver, 50)
    wrong = dataclasses.replace(load, num_tokens=49)
    assert receiver.step(loads=[wrong]) == [set(load.block_ids)]
    assert receiver.failed == [{load.handoff_id: pb.REFUSAL_REASON_INCOMPLETE}]


async def test_caches_that_no_heads_divide_are_refused(pair):
    """Layers of the sender hold twice the heads, so its shards are no parts of this cache."""
    sender, receiver = await pair.start("1 to 2")
    layout = dataclasses.replace(
        sender.layout, num_kv_heads=8, block_bytes=2 * sender.layout.block_bytes
    )
    client = await TransferClient.start(KvTransferConfig(**SIZE), str(pair.directory / "x.sock"))
    try:
        await client.configure(layout.fingerprint())
        await client.open_send(secrets.token_bytes(16), receiver.client.address, 3, 12, 5.0)
        async with asyncio.timeout(30):
            events = await client.next_events()
        assert "tp_size is 1, here 2" in events[0].detail
        assert "num_kv_heads is 8, here 2" in events[0].detail
    finally:
        await client.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot_blocks", [1, 6], ids=["small slots", "slots"])
@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "bounced"])
def test_a_block_of_the_sender_may_be_larger_than_scratch(device, slot_blocks, pin):
    """The sender's rank has the heads of four ranks; a slot holds blocks of one of them."""
    layout = layout_of(ONE_GROUP, 4)
    sender = layout.split_into(1)
    whole = torch.randint(256, (BLOCKS, 4, 4, CONTENT)).to(torch.uint8)
    staging = torch.frombuffer(mmap.mmap(-1, 2**20), dtype=torch.uint8)
    staging[: whole.numel()] = whole.flatten()
    caches = {
        f"layer.{layer}": paged(torch.zeros_like(whole[:, :1]), TOKENS_FIRST, 0, device)
        for layer in range(layout.num_layers)
    }
    cache = PagedCache(caches, layout)
    if device == "cpu":
        copies = CpuDeviceCopies(cache, staging)
    else:
        copies = CudaDeviceCopies(
            cache, staging, slot_bytes=slot_blocks * layout.block_bytes, num_slots=2, pin=pin
        )
        assert copies.pinned == pin
    ids = torch.randperm(BLOCKS).tolist()[:12]
    heads = head_ranges(layout, 2, sender, 0)[sender.groups[0]]
    # The blocks from the third one on.
    run = Run(2, 10, 2 * sender.block_bytes)
    copies.scatter([LayerRun(1, copies.prepare(ids), run, heads)]).wait()
    copies.join_scatters()
    expected = torch.zeros_like(whole[:, :1])
    expected[ids[2:]] = whole[2:12, 2:3]
    assert torch.equal(caches["layer.1"].cpu(), expected)
    assert not caches["layer.0"].any()
    copies.close()
