"""Copies of a cache in host memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

import torch

from baton.kvtransfer.arena import MADV_POPULATE_WRITE
from baton.kvtransfer.connector.handoffs.block_copies import BlockCopies, LayerRun, LayerRuns, Run
from baton.kvtransfer.connector.handoffs.notifier import Copy
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.frames import FRAME_TARGET_BYTES
from baton.kvtransfer.head_ranges import HeadRange


class _Done:
    def wait(self) -> None:
        return


_DONE = _Done()


def neighbours(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields each run of adjacent blocks: (index in block_ids, first block ID, length)."""
    begin = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield begin, block_ids[begin], index - begin
            begin = index


class CpuDeviceCopies(BlockCopies):
    """Plain memory copies.

    Blocks that are contiguous in memory are copied by address: in a fragmented cache each block is
    a separate copy, and slicing two tensors takes as long as the copy.
    """

    finishes_at_once = True
    gathers_wait = False

    def __init__(self, cache: PagedCache, staging: torch.Tensor) -> None:
        self._cache, self._words = cache, cache.words(staging)
        self._staging, self._size = staging.data_ptr(), staging.numel()
        layers = cache.layers.items()
        self._num_blocks = min(len(view) for _, view in layers)
        self._addresses = {layer: view.data_ptr() for layer, view in layers}
        self._by_address = {
            layer: view.ndim == 2 and view.is_contiguous() for layer, view in layers
        }
        for _, view in layers:
            _prefault(view.untyped_storage())

    def bind_thread(self) -> None:
        return

    def prepare(self, block_ids: Sequence[int]) -> Sequence[int]:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"block ids are {block_ids}; must be below {self._num_blocks}")
        return block_ids

    def max_blocks(self, layer: int) -> int:
        return max(1, FRAME_TARGET_BYTES // self._cache.groups[layer].block_bytes)

    def gather(self, parts: Sequence[LayerRuns]) -> Copy:
        for part in parts:
            for run in part.runs:
                self._gather(part.layer, part.blocks, run)
        return _DONE

    def _gather(self, layer: int, blocks: Sequence[int], run: Run) -> None:
        if self._by_address[layer]:
            for staging, cache, size in self._addressed(layer, blocks, run):
                ctypes.memmove(staging, cache, size)
            return
        rows = self._rows(layer, run)
        for at, block_id, count in _neighbours(blocks, run):
            rows[at : at + count].copy_(self._cache.layers[layer][block_id : block_id + count])

    def scatter(self, parts: Sequence[LayerRun]) -> Copy:
        for part in parts:
            self._scatter(part)
        return _DONE

    def _scatter(self, part: LayerRun) -> None:
        layer, run, heads = part.layer, part.run, part.heads
        if self._by_address[layer] and heads is None:
            for staging, cache, size in self._addressed(layer, part.blocks, run):
                ctypes.memmove(cache, staging, size)
            return
        rows, view = self._rows(layer, run, heads), self._cache.view(layer, heads)
        for at, block_id, count in _neighbours(part.blocks, run):
            view[block_id : block_id + count].copy_(rows[at : at + count])

    def clear(self, block_ids: Sequence[int]) -> None:
        self._clear(block_ids)

    def clear_draft(self, block_ids: Sequence[int]) -> None:
        self._clear(block_ids, only_draft=True)

    def _clear(self, block_ids: Sequence[int], *, only_draft: bool = False) -> None:
        # Filling slices takes a third of the time of index_fill_.
        runs = list(neighbours(sorted(self.prepare(block_ids))))
        for words in self._cache.cleared(only_draft=only_draft):
            for _, block_id, count in runs:
                words[block_id : block_id + count].zero_()

    def landing(self) -> Copy:
        return _DONE

    def join_gathers(self) -> None:
        return

    def join_scatters(self) -> None:
        return

    def close(self) -> None:
        return

    def _rows(self, layer: int, run: Run, heads: HeadRange | None = None) -> torch.Tensor:
        words = self._cache.word_range(layer, run.offset, run.num_blocks, heads)
        return self._cache.rows(layer, self._words[words], heads)

    def _addressed(
        self, layer: int, blocks: Sequence[int], run: Run
    ) -> Iterator[tuple[int, int, int]]:
        """Yields each copy of a run: address in staging, address in the cache, bytes."""
        block_bytes = self._cache.groups[layer].block_bytes
        if not 0 <= run.offset <= self._size - run.num_blocks * block_bytes:
            raise ValueError(
                f"{run.num_blocks} blocks at {run.offset} of staging; it has {self._size} bytes"
            )
        staging, cache = self._staging + run.offset, self._addresses[layer]
        for at, block_id, count in _neighbours(blocks, run):
            yield staging + at * block_bytes, cache + block_id * block_bytes, count * block_bytes


def _neighbours(blocks: Sequence[int], run: Run) -> Iterator[tuple[int, int, int]]:
    return neighbours(blocks[run.begin : run.begin + run.num_blocks])


def _prefault(storage: torch.UntypedStorage) -> None:
    """Maps a cache's pages before the first handoff is loaded into them.

    Torch leaves this to the first write of each page, which costs five times the copy. The function
    uses large pages if the system provides them. Kernels before Linux 5.14 do not support either
    advice, and ignore it.
    """
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = storage.data_ptr() + storage.nbytes() - begin
    libc = ctypes.CDLL(None)
    for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
