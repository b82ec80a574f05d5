"""Copies between a rank's paged KV cache and staging, on the CPU and on a GPU.

Staging holds a block as [heads, tokens, content], contiguous, whatever the strides of the cache: a
copy follows the cache's logical axes, so that the order of a block's axes in staging
(`KvLayout.axes`) does not depend on how the engine lays out its memory. vLLM 0.32 gives every
backend's cache as [blocks, heads, tokens, content] per layer and hides its layout in the strides
(vllm/v1/kv_cache_layout.py): [L, B, H, N, C] on the CPU, [L, B, N, H, C] with FlashAttention,
blocks before layers where a layer's blocks are packed with those of the others.

On a GPU three streams beside the model's move the bytes, by events alone:

    kernels   gathers blocks into scratch and scatters scratch into blocks
    out       scratch to staging
    in        staging to scratch

The host waits for none of them while it launches a model; the model's stream waits for `kernels`
only (`join`), never for a bus.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.kvtransfer.arena import MADV_POPULATE_WRITE
from baton.kvtransfer.connector.notifier import Copy
from baton.kvtransfer.engine_port import split_blocks
from baton.kvtransfer.frames import FRAME_TARGET_BYTES
from baton.kvtransfer.layout import KvLayout

# Of each ring of scratch. It bounds what a GPU has gathered and not yet copied out, so that a bus
# slower than the model holds up the model, not the memory; and how long after its gathers a step's
# bytes can be under way: 64 MiB, 40 ms over the slowest bus in use.
_NUM_SLOTS = 32
_SLOT_TIMEOUT_S = 5.0
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks that lie side by side in staging.

    Attributes:
        begin: index of the first in the block ids that were prepared.
        offset: of its bytes in the segment.
    """

    begin: int
    num_blocks: int
    offset: int


def block_view(name: str, cache: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """A layer's cache as [blocks, heads, parts of a block, tokens of a part, content].

    A kernel that takes smaller blocks than the scheduler hands out has each cut into parts, one
    after the other on the first axis; otherwise a block is one part.

    Raises:
        ValueError: it is not [blocks, heads, tokens, content] as the layout says.
    """
    heads, block_size, expected = layout.num_kv_heads, layout.block_size_tokens, layout.block_bytes
    parts = block_size // cache.shape[2] if cache.ndim == 4 and cache.shape[2] else 0
    fits = (
        parts > 0
        and parts * cache.shape[2] == block_size
        and cache.shape[0] % parts == 0
        and cache.shape[1] == heads
        and heads * block_size * cache.shape[3] * cache.element_size() == expected
        and cache.stride(3) == 1
    )
    if not fits:
        raise ValueError(
            f"the cache of {name} has shape {list(cache.shape)}, strides {list(cache.stride())} "
            f"and type {cache.dtype}; Baton needs [blocks, {heads} heads, {block_size} tokens, "
            f"content] with {expected} bytes per block, and content contiguous"
        )
    return cache.unflatten(0, (cache.shape[0] // parts, parts)).transpose(1, 2)


class PagedCache:
    """One rank's cache as blocks of words: what is copied has no other meaning here.

    Attributes:
        layers: per layer a view [blocks, ...] of the engine's memory.
        indices: of the layers, by the engine's names.
        word: what a block is moved in: the widest integer that divides and aligns all of it.

    Raises:
        ValueError: not as many layers as announced, one that is laid out differently, or layers on
            several devices.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], layout: KvLayout) -> None:
        if len(kv_caches) != layout.num_layers:
            raise ValueError(
                f"the cache has {len(kv_caches)} layers; announced {layout.num_layers}"
            )
        devices = {cache.device for cache in kv_caches.values()}
        if len(devices) != 1:
            raise ValueError(
                f"the cache is on {', '.join(sorted(map(str, devices)))}; Baton needs it on one"
            )
        views = [block_view(name, cache, layout) for name, cache in kv_caches.items()]
        self.device = devices.pop()
        self.block_bytes = layout.block_bytes
        self.indices = {name: index for index, name in enumerate(kv_caches)}
        self.word = next(word for word in _WORDS if all(_is_made_of(view, word) for view in views))
        self.layers = [view.view(self.word) for view in views]
        if all(layer[0].is_contiguous() for layer in self.layers):
            # [blocks, words]: the faster to copy.
            self.layers = [layer.flatten(1) for layer in self.layers]

    def clear(self, block_ids: torch.Tensor) -> None:
        """Fills blocks of every layer with zeros."""
        for layer in self.layers:
            layer.index_fill_(0, block_ids, 0)

    @property
    def block_words(self) -> int:
        return self.block_bytes // int(self.word.itemsize)

    def rows(self, words: torch.Tensor) -> torch.Tensor:
        """Contiguous words of whole blocks, shaped as the layers are."""
        return words.view(-1, *self.layers[0].shape[1:])

    def words(self, staging: torch.Tensor) -> torch.Tensor:
        """Bytes as words; a remainder at the end is left out."""
        size = int(self.word.itemsize)
        return staging[: staging.numel() // size * size].view(self.word)

    def word_range(self, offset: int, num_blocks: int) -> slice:
        """Where blocks at an offset of staging are, in words."""
        start = offset // int(self.word.itemsize)
        return slice(start, start + num_blocks * self.block_words)


def _is_made_of(view: torch.Tensor, word: torch.dtype) -> bool:
    old, new = view.element_size(), int(word.itemsize)
    distances = [stride * old for stride in view.stride()[:-1]]
    ends = [view.data_ptr(), view.storage_offset() * old, view.shape[-1] * old]
    return new >= old and all(each % new == 0 for each in distances + ends)


class BlockCopies(ABC):
    """Copies of one rank. One thread uses it; only what a gather returns may go to another.

    Attributes:
        finishes_at_once: a copy has ended when the call returns.
        max_blocks: of one gather.
    """

    finishes_at_once: bool
    max_blocks: int

    @abstractmethod
    def prepare(self, block_ids: Sequence[int]) -> Any:
        """Block ids of one step, as the other calls take them: the same for all layers."""

    @abstractmethod
    def gather(self, layer: int, blocks: Any, runs: Sequence[Run]) -> Copy:
        """From the cache to staging: runs that follow each other in `blocks`.

        What the stream of the caller has written before is what is copied.
        """

    @abstractmethod
    def scatter(self, layer: int, blocks: Any, run: Run) -> Copy:
        """From staging to the cache. The copy has ended when staging has been read.

        What the stream of the caller does before is over when the blocks change; for what it does
        afterwards it must `join` first.
        """

    @abstractmethod
    def clear(self, block_ids: Sequence[int]) -> None:
        """Fills blocks of every layer with zeros, on the caller's stream, after earlier copies."""

    @abstractmethod
    def join(self) -> None:
        """What the caller's stream does from now on comes after every gather's and scatter's touch.

        Of the paged cache, that is: bytes may still be on their way to staging.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies, and lets go of staging; idempotent."""


def open_copies(cache: PagedCache, staging: torch.Tensor) -> BlockCopies:
    """The copies for where the cache is.

    Args:
        cache: one rank's.
        staging: the segment, as bytes.

    Raises:
        ValueError: a kind of device that Baton cannot copy from.
    """
    if cache.device.type == "cpu":
        return HostCopies(cache, staging)
    if cache.device.type == "cuda":
        return CudaCopies(cache, staging)
    raise ValueError(f"the cache is on {cache.device}; Baton hands over from CPUs and CUDA GPUs")


class _Done:
    def wait(self) -> None:
        return


_DONE = _Done()


def neighbours(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring blocks, each run one plain copy: (index in block_ids, first id, length)."""
    begin = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield begin, block_ids[begin], index - begin
            begin = index


class HostCopies(BlockCopies):
    """The cache is in the host's memory: plain copies.

    Blocks that are whole in memory are copied by address: in a fragmented cache each block is a
    copy of its own, and slicing two tensors for it takes as long as the copy.
    """

    finishes_at_once = True

    def __init__(self, cache: PagedCache, staging: torch.Tensor) -> None:
        self._cache, self._words = cache, cache.words(staging)
        self._staging, self._size = staging.data_ptr(), staging.numel()
        self._num_blocks = min(len(layer) for layer in cache.layers)
        self._addresses = [layer.data_ptr() for layer in cache.layers]
        self._by_address = all(layer.ndim == 2 and layer.is_contiguous() for layer in cache.layers)
        self.max_blocks = max(1, FRAME_TARGET_BYTES // cache.block_bytes)
        for layer in cache.layers:
            _prefault(layer.untyped_storage())

    def prepare(self, block_ids: Sequence[int]) -> Sequence[int]:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self._num_blocks:
            raise ValueError(f"block ids are {block_ids}; must be below {self._num_blocks}")
        return block_ids

    def gather(self, layer: int, blocks: Sequence[int], runs: Sequence[Run]) -> Copy:
        for run in runs:
            if self._by_address:
                for staging, cache, size in self._addressed(layer, blocks, run):
                    ctypes.memmove(staging, cache, size)
                continue
            rows = self._rows(run)
            for at, block_id, count in _neighbours(blocks, run):
                rows[at : at + count].copy_(self._cache.layers[layer][block_id : block_id + count])
        return _DONE

    def scatter(self, layer: int, blocks: Sequence[int], run: Run) -> Copy:
        if self._by_address:
            for staging, cache, size in self._addressed(layer, blocks, run):
                ctypes.memmove(cache, staging, size)
            return _DONE
        rows = self._rows(run)
        for at, block_id, count in _neighbours(blocks, run):
            self._cache.layers[layer][block_id : block_id + count].copy_(rows[at : at + count])
        return _DONE

    def clear(self, block_ids: Sequence[int]) -> None:
        self._cache.clear(torch.tensor(self.prepare(block_ids), dtype=torch.int64))

    def join(self) -> None:
        return

    def close(self) -> None:
        return

    def _rows(self, run: Run) -> torch.Tensor:
        return self._cache.rows(self._words[self._cache.word_range(run.offset, run.num_blocks)])

    def _addressed(
        self, layer: int, blocks: Sequence[int], run: Run
    ) -> Iterator[tuple[int, int, int]]:
        """Each plain copy of a run: addresses in staging and in the cache, and bytes."""
        block_bytes = self._cache.block_bytes
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
    """Makes a cache's pages be there before the first handoff is loaded into them.

    torch leaves that to the first write of each, which then costs five times the copy. Large pages
    where the system gives them; kernels that know neither (before Linux 5.14) change nothing.
    """
    begin = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = storage.data_ptr() + storage.nbytes() - begin
    libc = ctypes.CDLL(None)
    for advice in (mmap.MADV_HUGEPAGE, MADV_POPULATE_WRITE):
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)


@dataclass(slots=True)
class _Slot:
    """Scratch of one gather, or of one piece of a scatter.

    Attributes:
        words: on the GPU.
        used: when they may be written again; None before the first use.
        host: as much pinned memory, where staging itself is not pinned.
        left: what is in `host` has been copied on: by a thread that waits for a gather, or (`read`)
            by the GPU.
    """

    words: torch.Tensor
    host: torch.Tensor | None
    used: Any = None
    left: threading.Event = field(default_factory=threading.Event)
    read: Any = None

    def __post_init__(self) -> None:
        self.left.set()


class _Arriving:
    """A copy that ends with an event."""

    def __init__(self, copied: Any) -> None:
        self._copied = copied

    def wait(self) -> None:
        # The event blocks instead of spinning, and torch lets go of the interpreter lock.
        self._copied.synchronize()


class _Bouncing:
    """A copy that ends in pinned memory, with the rest of the way left to the waiting thread."""

    def __init__(
        self, copied: Any, slot: _Slot, targets: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._copied, self._slot, self._targets = copied, slot, targets

    def wait(self) -> None:
        try:
            self._copied.synchronize()
            # vLLM makes its tensors in inference mode, which is a thread's own.
            with torch.inference_mode():
                for target, source in self._targets:
                    target.copy_(source)
        finally:
            self._slot.left.set()


class CudaCopies(BlockCopies):
    """The cache is in a GPU's memory.

    Staging is pinned as it is (cudaHostRegister), so that the bus reads and writes it without
    another copy. Where that is refused, pinned buffers of the size of the scratch lie between, and
    a gather waits on the host for one to be free.

    Args:
        slot_bytes: of the largest single copy; a block that is larger is one copy.
        num_slots: for each direction.
        pin: whether to try to pin staging.
    """

    finishes_at_once = False

    def __init__(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        *,
        slot_bytes: int = FRAME_TARGET_BYTES,
        num_slots: int = _NUM_SLOTS,
        pin: bool = True,
    ) -> None:
        self._cache, self._device = cache, cache.device
        self._staging, self._words = staging, cache.words(staging)
        self.max_blocks = max(1, slot_bytes // cache.block_bytes)
        self._kernels = torch.cuda.Stream(self._device)
        self._out = torch.cuda.Stream(self._device)
        self._in = torch.cuda.Stream(self._device)
        self._touched: Any = None
        self._closed = False
        self._pinned = pin and _pin(staging, self._device)
        # Neither ring is ever given back to torch while a stream uses it: `close` waits for all.
        self._outgoing = itertools.cycle([self._slot() for _ in range(num_slots)])
        self._incoming = itertools.cycle([self._slot() for _ in range(num_slots)])

    @property
    def pinned(self) -> bool:
        """Whether staging itself is."""
        return bool(self._pinned)

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        # From pinned memory, or the host would wait for the copy. torch keeps that memory until the
        # stream has read it, and the result until `kernels`, its one user, has passed it.
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._kernels):
            return ids.to(self._device, non_blocking=True)

    def gather(self, layer: int, blocks: torch.Tensor, runs: Sequence[Run]) -> Copy:
        slot = next(self._outgoing)
        if slot.host is not None:
            if not slot.left.wait(_SLOT_TIMEOUT_S):
                raise TimeoutError(f"no copy to staging has ended in {_SLOT_TIMEOUT_S} s")
            slot.left.clear()
        begin, count = runs[0].begin, sum(run.num_blocks for run in runs)
        assert count <= self.max_blocks, f"{count} blocks in one gather; at most {self.max_blocks}"
        scratch = slot.words[: count * self._cache.block_words]
        written = torch.cuda.current_stream(self._device).record_event()
        with torch.cuda.stream(self._kernels):
            self._kernels.wait_event(written)
            if slot.used is not None:
                self._kernels.wait_event(slot.used)
            torch.index_select(
                self._cache.layers[layer],
                0,
                blocks[begin : begin + count],
                out=self._cache.rows(scratch),
            )
            self._touched = self._kernels.record_event()
        copied = torch.cuda.Event(blocking=True)
        targets = []
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._touched)
            if slot.host is not None:
                host = slot.host[: len(scratch)]
                host.copy_(scratch, non_blocking=True)
            at = 0
            for run in runs:
                staging = self._words[self._cache.word_range(run.offset, run.num_blocks)]
                end = at + len(staging)
                if slot.host is None:
                    staging.copy_(scratch[at:end], non_blocking=True)
                else:
                    targets.append((staging, host[at:end]))
                at = end
            copied.record(self._out)
        slot.used = copied
        return _Arriving(copied) if slot.host is None else _Bouncing(copied, slot, targets)

    def scatter(self, layer: int, blocks: torch.Tensor, run: Run) -> Copy:
        before = torch.cuda.current_stream(self._device).record_event()
        cache = self._cache.layers[layer]
        for first, count in split_blocks(
            0, run.num_blocks, self._cache.block_bytes, self.max_blocks * self._cache.block_bytes
        ):
            slot = next(self._incoming)
            offset = run.offset + first * self._cache.block_bytes
            source = self._words[self._cache.word_range(offset, count)]
            scratch = slot.words[: len(source)]
            if slot.host is not None:
                if slot.read is not None:
                    slot.read.synchronize()
                host = slot.host[: len(source)]
                source = host.copy_(source)
            copied = torch.cuda.Event(blocking=True)
            with torch.cuda.stream(self._in):
                if slot.used is not None:
                    self._in.wait_event(slot.used)
                scratch.copy_(source, non_blocking=True)
                copied.record(self._in)
            with torch.cuda.stream(self._kernels):
                self._kernels.wait_event(before)
                self._kernels.wait_event(copied)
                begin = run.begin + first
                cache.index_copy_(0, blocks[begin : begin + count], self._cache.rows(scratch))
                slot.used = self._touched = self._kernels.record_event()
            slot.read = copied
        return _Arriving(copied)

    def clear(self, block_ids: Sequence[int]) -> None:
        self.join()
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        self._cache.clear(ids.to(self._device, non_blocking=True))

    def join(self) -> None:
        if self._touched is not None:
            torch.cuda.current_stream(self._device).wait_event(self._touched)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A GPU that has failed says so again here; what it was to copy is lost either way.
        with contextlib.suppress(RuntimeError):
            for stream in (self._kernels, self._out, self._in):
                stream.synchronize()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._staging.data_ptr())

    def _slot(self) -> _Slot:
        num_words = self.max_blocks * self._cache.block_words
        words = torch.empty(num_words, dtype=self._cache.word, device=self._device)
        host = None
        if not self._pinned:
            host = torch.empty(num_words, dtype=self._cache.word, pin_memory=True)
        return _Slot(words, host)


def _pin(staging: torch.Tensor, device: torch.device) -> bool:
    """Makes memory that is mapped already readable and writable for the bus."""
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), staging.numel(), 0)
        if error.value == 0:
            return True
        logger.warning(
            "staging cannot be pinned (%s): KV blocks take one more copy on the host",
            torch.cuda.cudart().cudaGetErrorString(error),
        )
        # CUDA reports a failed call again to whoever launches the next kernel: that is us.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        return False
