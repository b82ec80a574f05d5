"""CudaDeviceCopies on a simulated GPU: the same bytes whatever the order of streams."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from baton.kvtransfer.connector.handoffs.block_copies import LayerRun, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.cpu_device_copies import CpuDeviceCopies
from baton.kvtransfer.connector.handoffs.cuda_device_copies import CudaDeviceCopies
from baton.kvtransfer.connector.handoffs.notifier import Copy
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.layout import KvLayout
from tests.gpu.simulated_gpu import SimulatedGpu, simulated_gpu

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 6, 64, 2, 4, 8
SIZE = HEADS * TOKENS * CONTENT * 2
LAYOUT = KvLayout(
    "m", "r", "bfloat16", LAYERS, HEADS, CONTENT // 2, TOKENS, SIZE, "heads,tokens,content"
)
# Physical orders of a layer: contiguous blocks, and tokens before heads.
ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3)]


def make_cache(seed: int, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = [(BLOCKS, HEADS, TOKENS, CONTENT)[axis] for axis in order]
    back = [order.index(axis) for axis in range(4)]
    return {
        str(layer): torch.randint(0, 99, shape, generator=generator).bfloat16().permute(back)
        for layer in range(LAYERS)
    }


class Twins:
    """The copies under test, and copies on the host with the same bytes."""

    def __init__(self, gpu: SimulatedGpu, order: tuple[int, ...], slot_blocks: int) -> None:
        self.gpu = gpu
        self.caches = [make_cache(1, order) for _ in range(2)]
        self.staging = [torch.zeros(64 * SIZE * LAYERS, dtype=torch.uint8) for _ in range(2)]
        paged = [PagedCache(cache, LAYOUT) for cache in self.caches]
        gpu.own(*self.caches[0].values())
        self.copies = CudaDeviceCopies(
            paged[0], self.staging[0], slot_bytes=slot_blocks * SIZE, num_slots=2
        )
        self.reference = CpuDeviceCopies(paged[1], self.staging[1])
        self._gathers, self._loads = list[Copy](), list[Copy]()

    def gather(self, ids: list[int], runs: Mapping[int, list[Run]]) -> None:
        # Staging stays as it is until all loads have read it.
        self.wait(self._loads)
        for copies in (self.reference, self.copies):
            blocks = copies.prepare(ids)
            parts = [LayerRuns(layer, blocks, each) for layer, each in runs.items()]
            copy = copies.gather(parts)
            if copies.gathers_wait:
                # Each copy frees a buffer.
                copy.wait()
            else:
                self._gathers.append(copy)
        self.copies.join_gathers()

    def scatter(self, ids: list[int], runs: Mapping[int, Run]) -> None:
        # Gathers have filled staging before a handoff is loaded from it.
        self.wait(self._gathers)
        for copies in (self.reference, self.copies):
            blocks = copies.prepare(ids)
            copy = copies.scatter([LayerRun(layer, blocks, each) for layer, each in runs.items()])
            self._loads.append(copy)
        self.copies.join_scatters()

    def compute(self, layer: int, ids: list[int], value: float) -> None:
        def kernel(cache: dict[str, torch.Tensor]) -> None:
            cache[str(layer)][ids] = value

        kernel(self.caches[1])
        self.gpu.launch(lambda: kernel(self.caches[0]))

    def wait(self, copies: list[Copy]) -> None:
        while copies:
            copies.pop().wait()

    def check(self) -> None:
        self.wait(self._gathers)
        self.wait(self._loads)
        self.gpu.synchronize()
        assert torch.equal(*self.staging)
        for name, layer in self.caches[0].items():
            assert torch.equal(layer, self.caches[1][name]), name


def runs_of(source: random.Random, most: int) -> list[Run]:
    """Returns one or two runs of at most so many blocks, in places of staging of their own."""
    count = source.randint(1, most)
    cut = source.randint(0, count)
    at = source.randrange(0, 64 - count)
    parts = [(0, cut, at), (cut, count - cut, at + cut)]
    return [Run(begin, num, place * SIZE) for begin, num, place in parts if num]


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "bounced"])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("number", range(15))
def test_the_same_bytes_as_on_the_host(number: int, order: tuple[int, ...], pins: bool) -> None:
    """Gathers and scatters of one and of several layers, between steps that change the cache."""
    source = random.Random(number)
    with simulated_gpu(number, pins=pins) as gpu:
        twins = Twins(gpu, order, slot_blocks := source.choice([3, 8, 24]))
        area, load_share = 64 * SIZE, source.choice([0.0, 0.5, 1.0])
        for _ in range(12):
            ids = source.sample(range(BLOCKS), 24)
            num_layers = source.randint(1, LAYERS)
            most = max(1, slot_blocks // num_layers)
            layers = source.sample(range(LAYERS), min(num_layers, slot_blocks))
            loads = source.random() < load_share
            # A scatter of one layer takes as many slots as it needs.
            most = 20 if loads and num_layers == 1 else min(most, 20)
            runs = {layer: runs_of(source, most) for layer in layers}
            # Staging has one layer after the other without gaps, or an area for each layer.
            if source.random() < 0.5:
                at = 0
                for layer in layers:
                    num = sum(run.num_blocks for run in runs[layer])
                    runs[layer], at = [Run(0, num, at)], at + num * SIZE
                moved = runs
            else:
                moved = {
                    layer: [replace(run, offset=run.offset + layer * area) for run in each]
                    for layer, each in runs.items()
                }
            if loads:
                twins.scatter(ids, {layer: each[0] for layer, each in moved.items()})
            else:
                twins.gather(ids, moved)
            # The next step writes blocks.
            twins.compute(source.choice(layers), source.sample(range(BLOCKS), 32), source.random())
        twins.check()
        twins.copies.close()


def test_layers_in_one_copy_take_fewer_launches() -> None:
    """Each kernel, copy and event takes the host some microseconds, between those of the model."""
    ids, runs = list(range(8)), {layer: [Run(0, 8, layer * 8 * SIZE)] for layer in range(LAYERS)}
    with simulated_gpu(1) as gpu:
        twins = Twins(gpu, ORDERS[0], slot_blocks=8 * LAYERS)
        counts = []
        for groups in ([{layer: each} for layer, each in runs.items()], [runs]):
            before = gpu.num_calls
            for group in groups:
                twins.gather(ids, group)
                twins.scatter(ids, {layer: each[0] for layer, each in group.items()})
            counts.append(gpu.num_calls - before)
        twins.check()
        twins.copies.close()
    alone, joined = counts
    assert 3 * joined < alone
