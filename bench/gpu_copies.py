"""Measures gathers and scatters of KV blocks on a GPU, with the limits of its bus and memory.

    python -m baton.bench.gpu_copies --json gpu-copies.json

Needs a CUDA GPU. The block shapes are those of one layer of Llama-8B, and of one of eight ranks of
Llama-70B. Every line is the median of several runs in this process. A "step" is 32 layers of 4,096
tokens in blocks scattered over the cache.
"""

from __future__ import annotations

import argparse
import mmap
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from baton.kvtransfer.connector.handoffs.block_copies import LayerRun, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.cuda_device_copies import CudaDeviceCopies
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.engine_port import split_blocks
from baton.kvtransfer.frames import FRAME_TARGET_BYTES, checksum
from baton.kvtransfer.layout import KvLayout
from baton.load import stats

# Lines of a table by column.
Rows = list[dict[str, Any]]
_LAYERS, _TOKENS, _BLOCK_TOKENS, _HEAD_SIZE = 32, 4096, 16, 128
_SHAPES = {"Llama-8B": 8, "Llama-70B / 8": 1}
# Physical orders of [blocks, heads, tokens, content].
_ORDERS = {"tokens, heads": (0, 2, 1, 3), "heads, tokens": (0, 1, 2, 3)}
_CACHE_BLOCKS = 2 * _TOKENS // _BLOCK_TOKENS
_RUNS = 5
_MATRIX = 4096


def _seconds(call: Callable[[], object]) -> float:
    """Returns the median duration of a call; each run begins and ends with an idle GPU."""
    call()
    times = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _gb_per_s(num_bytes: int, call: Callable[[], object]) -> float:
    return num_bytes / _seconds(call) / 1e9


def _checksums(data: memoryview, num_threads: int) -> Callable[[], None]:
    """Returns a function that computes the checksums of all frames, as the connector does."""
    frames = [
        data[begin : begin + FRAME_TARGET_BYTES]
        for begin in range(0, len(data), FRAME_TARGET_BYTES)
    ]
    pool = ThreadPoolExecutor(num_threads)

    def call() -> None:
        for _ in pool.map(checksum, frames):
            pass

    return call


def _ceilings(num_bytes: int) -> dict[str, float]:
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    other = torch.empty_like(device)
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    memory = memoryview(pageable.numpy())

    def to_host() -> None:
        pinned.copy_(device, non_blocking=True)

    def to_device() -> None:
        device.copy_(pinned, non_blocking=True)

    return {
        "bus, device to pinned host": _gb_per_s(num_bytes, to_host),
        "bus, pinned host to device": _gb_per_s(num_bytes, to_device),
        "device to device": _gb_per_s(num_bytes, lambda: other.copy_(device)),
        "host memcpy": _gb_per_s(num_bytes, lambda: pinned.copy_(pageable)),
        **{
            f"host checksum, {num} threads": _gb_per_s(num_bytes, _checksums(memory, num))
            for num in (1, 2, 4, 8)
        },
    }


def _layers(heads: int, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    shape = (_CACHE_BLOCKS, heads, _BLOCK_TOKENS, 2 * _HEAD_SIZE)
    physical = [shape[axis] for axis in order]
    back = [order.index(axis) for axis in range(4)]
    return {
        str(index): torch.zeros(physical, dtype=torch.bfloat16, device="cuda").permute(back)
        for index in range(_LAYERS)
    }


class _Step:
    """The copies of one step, as the connector makes them.

    Args:
        heads: Heads of a block.
        order: Physical order of a layer.
        pin: Whether staging is pinned.
        slots: Size in bytes and number of the scratch slots; the connector's by default.
    """

    def __init__(self, heads: int, order: tuple[int, ...], *, pin: bool, **slots: int) -> None:
        block_bytes = heads * _BLOCK_TOKENS * 2 * _HEAD_SIZE * 2
        self.layout = KvLayout(
            "m", "r", "bfloat16", _LAYERS, heads, _HEAD_SIZE, _BLOCK_TOKENS, block_bytes, ""
        )
        self.num_blocks = _TOKENS // _BLOCK_TOKENS
        self.num_bytes = self.layout.shard_bytes(self.num_blocks)
        # A shared mapping, like a segment of the transfer service.
        self._staging = torch.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=torch.uint8)
        self.copies = CudaDeviceCopies(
            PagedCache(_layers(heads, order), self.layout), self._staging, pin=pin, **slots
        )
        self._ids = random.Random(1).sample(range(_CACHE_BLOCKS), self.num_blocks)

    def gather(self, compute: Callable[[], None] | None = None, *, wait: bool = True) -> None:
        blocks, under_way = self.copies.prepare(self._ids), []
        for layer in range(_LAYERS):
            if compute is not None:
                compute()
            for run in self._runs(layer):
                copy = self.copies.gather([LayerRuns(layer, blocks, [run])])
                if not self.copies.pinned:
                    # Unpinned copies go through a bounce buffer, which must be free for the next.
                    copy.wait()
                elif wait:
                    under_way.append(copy)
        self.copies.join_gathers()
        for copy in under_way:
            copy.wait()

    def scatter(self) -> None:
        blocks = self.copies.prepare(self._ids)
        for layer in range(_LAYERS):
            for run in self._runs(layer):
                self.copies.scatter([LayerRun(layer, blocks, run)])
        self.copies.join_scatters()

    def _runs(self, layer: int) -> list[Run]:
        block_bytes = self.layout.block_bytes
        most_bytes = self.copies.max_blocks(layer) * block_bytes
        return [
            Run(first, count, self.layout.offset(0, layer, first, self.num_blocks))
            for first, count in split_blocks(0, self.num_blocks, block_bytes, most_bytes)
        ]


def _computing() -> Callable[[], None]:
    """Returns a function that computes matrix products for about as long as a layer."""
    left, right = (torch.randn(_MATRIX, _MATRIX, device="cuda").bfloat16() for _ in range(2))
    result = torch.empty_like(left)

    def compute() -> None:
        for _ in range(8):
            torch.mm(left, right, out=result)

    return compute


def _orders() -> Rows:
    """Returns the speeds by shape and order of the cache, pinned and not."""
    made = []
    for shape, heads in _SHAPES.items():
        for name, order in _ORDERS.items():
            for pin in (True, False):
                step = _Step(heads, order, pin=pin)
                made.append(
                    {
                        "block": shape,
                        "order in memory": name,
                        "staging": "pinned" if step.copies.pinned else "bounced",
                        **_speeds(step),
                    }
                )
                step.copies.close()
    return made


def _slots() -> Rows:
    """Returns the speeds with slots of several sizes, which take the same memory together."""
    made = []
    for mebibytes in (2, 4, 8, 16, 32):
        slots = {"slot_bytes": mebibytes * 2**20, "num_slots": 64 // mebibytes}
        step = _Step(8, _ORDERS["tokens, heads"], pin=True, **slots)
        launch_ms = round(_launch_s(step) * 1e3, 3)
        made.append({"slot MiB": mebibytes, **_speeds(step), "ms to launch a layer": launch_ms})
        step.copies.close()
    return made


def _beside_a_model() -> Rows:
    """Returns how long a model of 32 layers takes alone, and with its gathers."""
    step, compute = _Step(8, _ORDERS["tokens, heads"], pin=True), _computing()
    seconds = {
        "alone": _seconds(lambda: [compute() for _ in range(_LAYERS)]),
        "with its gathers, until the last byte is in staging": _seconds(
            lambda: step.gather(compute)
        ),
        "gathers alone": _seconds(step.gather),
        "host time to launch one layer's gathers": _launch_s(step),
    }
    step.copies.close()
    return [
        {"model of 32 layers": name, "ms": round(each * 1e3, 3)} for name, each in seconds.items()
    ]


def _speeds(step: _Step) -> dict[str, float]:
    return {
        "gather GB/s": round(_gb_per_s(step.num_bytes, step.gather), 1),
        "scatter GB/s": round(_gb_per_s(step.num_bytes, step.scatter), 1),
    }


def _launch_s(step: _Step) -> float:
    """Returns the host's seconds per layer to launch the gathers, without waiting for them."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step.gather(wait=False)
    return (time.perf_counter() - begin) / _LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("bench/results/gpu-copies.json"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    num_bytes = 2 * _LAYERS * _TOKENS * 8 * 2 * _HEAD_SIZE
    found = {
        "ceilings": [
            {"ceiling": name, "GB/s": round(speed, 1)}
            for name, speed in _ceilings(num_bytes).items()
        ],
        "orders": _orders(),
        "slots of 64 MiB together": _slots(),
        "beside a model": _beside_a_model(),
    }
    stats.save({"device": torch.cuda.get_device_name(), **found}, given.json)
    for title, rows in found.items():
        cells = [[str(value) for value in row.values()] for row in rows]
        stats.print_table(title, list(rows[0]), cells)


if __name__ == "__main__":
    main()
