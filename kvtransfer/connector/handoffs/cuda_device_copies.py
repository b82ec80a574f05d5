"""Copies of a cache in GPU memory.

Four streams beside the model's stream move the bytes, ordered by events:

    gathers    gathers blocks into scratch
    out        copies scratch to staging
    in         copies staging to scratch
    scatters   scatters scratch into blocks

The host waits for none of them while it launches a model. The model's stream waits for `gathers`
(`join_gathers`), never for the bus, and for `scatters` only where a step needs what it loads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.kvtransfer.connector.handoffs.block_copies import BlockCopies, LayerRun, LayerRuns
from baton.kvtransfer.connector.handoffs.notifier import Copy
from baton.kvtransfer.connector.handoffs.paged_cache import PagedCache
from baton.kvtransfer.frames import FRAME_TARGET_BYTES

# Largest copy. Launching one takes the host about as long as the bus needs for 8 MiB, so frames are
# copied together, also those of several layers.
_SLOT_BYTES = 4 * FRAME_TARGET_BYTES
# Slots of each scratch ring. They bound the bytes that are gathered and not yet copied out, so a
# slow bus delays the model and does not fill the memory. They also bound how long a step's bytes
# are under way: 64 MiB take 40 ms on the slowest bus in use.
_NUM_SLOTS = 8
_SLOT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Slot:
    """Scratch memory of one gather, or of one piece of a scatter.

    Attributes:
        words: Scratch on the GPU.
        used: Event after which `words` may be written again; None before the first use.
        host: Pinned memory of the same size, if staging itself is not pinned.
        left: Set when a gather's bytes in `host` have been copied to staging.
        read: Event after which the GPU has read a scatter's bytes from `host`.
    """

    words: torch.Tensor
    host: torch.Tensor | None
    used: Any = None
    left: threading.Event = field(default_factory=threading.Event)
    read: Any = None

    def __post_init__(self) -> None:
        self.left.set()


class _Arriving:
    """A copy that ends with a CUDA event."""

    def __init__(self, copied: Any) -> None:
        self._copied = copied

    def wait(self) -> None:
        # The event blocks instead of spinning, and torch releases the interpreter lock.
        self._copied.synchronize()


class _Bouncing:
    """A copy to pinned memory; the waiting thread then copies it to staging."""

    def __init__(
        self, copied: Any, slot: _Slot, targets: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._copied, self._slot, self._targets = copied, slot, targets

    def wait(self) -> None:
        try:
            self._copied.synchronize()
            # vLLM creates its tensors in inference mode, which is set per thread.
            with torch.inference_mode():
                for target, source in self._targets:
                    target.copy_(source)
        finally:
            self._slot.left.set()


class CudaDeviceCopies(BlockCopies):
    """Copies over the bus between a GPU and staging.

    Staging is pinned (cudaHostRegister), so that the bus reads and writes it directly. If pinning
    fails, pinned buffers of the scratch's size are used in between, and a gather waits on the host
    for a free one.

    Args:
        cache: The rank's cache.
        staging: The segment, as bytes.
        slot_bytes: Size of the largest copy; a larger block is copied at once.
        num_slots: Number of scratch slots for each direction.
        pin: Whether to try to pin staging.
    """

    finishes_at_once = False

    def __init__(
        self,
        cache: PagedCache,
        staging: torch.Tensor,
        *,
        slot_bytes: int = _SLOT_BYTES,
        num_slots: int = _NUM_SLOTS,
        pin: bool = True,
    ) -> None:
        self._cache, self._device = cache, cache.device
        self._staging, self._words = staging, cache.words(staging)
        # Every slot holds the largest block of any layer, and each layer's blocks up to its size.
        self._slot_bytes = scratch_slot_bytes(cache.largest_block_bytes, slot_bytes)
        self.joined_bytes = self._slot_bytes
        self._gathers = torch.cuda.Stream(self._device)
        self._out = torch.cuda.Stream(self._device)
        self._in = torch.cuda.Stream(self._device)
        self._scatters = torch.cuda.Stream(self._device)
        self._gathered: Any = None
        self._scattered: Any = None
        # Whether the last wait for a slot timed out. The next waits do not wait again until a slot
        # is free, so that a bus that stands still delays the model once and not in every layer.
        self._stalled = False
        self._closed = False
        self._pinned = pin and _pin(staging, self._device)
        self.gathers_wait = not self._pinned
        # Torch must not free either ring while a stream uses it: `close` waits for all streams.
        self._outgoing = itertools.cycle([self._slot() for _ in range(num_slots)])
        self._incoming = itertools.cycle([self._slot() for _ in range(num_slots)])

    @property
    def pinned(self) -> bool:
        """Whether staging itself is pinned."""
        return bool(self._pinned)

    def bind_thread(self) -> None:
        # A new thread uses GPU 0. Waiting for an event there would make a CUDA context on GPU 0,
        # in memory that the rank of GPU 0 has given to its KV cache.
        torch.cuda.set_device(self._device)

    def max_blocks(self, layer: int) -> int:
        return self._slot_bytes // self._cache.groups[layer].block_bytes

    def prepare(self, block_ids: Sequence[int]) -> torch.Tensor:
        # Pinned memory, because the host would wait for a copy from other memory. Torch keeps it
        # until the stream has read it, and keeps the result until the streams that use it have
        # passed it.
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._gathers):
            blocks = ids.to(self._device, non_blocking=True)
            blocks.record_stream(self._scatters)
            self._scatters.wait_event(self._gathers.record_event())
        return blocks

    def gather(self, parts: Sequence[LayerRuns]) -> Copy:
        slot = next(self._outgoing)
        if slot.host is not None:
            self._stalled = not slot.left.wait(0 if self._stalled else _SLOT_TIMEOUT_S)
            if self._stalled:
                raise TimeoutError(f"no copy to staging has ended in {_SLOT_TIMEOUT_S:g} s")
            slot.left.clear()
        written = torch.cuda.current_stream(self._device).record_event()
        end, ranges = 0, list[slice]()
        with torch.cuda.stream(self._gathers):
            self._gathers.wait_event(written)
            if slot.used is not None:
                self._gathers.wait_event(slot.used)
            for part in parts:
                layer, first = part.layer, part.runs[0].begin
                count = sum(run.num_blocks for run in part.runs)
                begin, end = end, end + count * self._cache.block_words(layer)
                assert end <= len(slot.words), f"{end} words in one gather of {len(slot.words)}"
                torch.index_select(
                    self._cache.layers[layer],
                    0,
                    part.blocks[first : first + count],
                    out=self._cache.rows(layer, slot.words[begin:end]),
                )
                ranges += (
                    self._cache.word_range(layer, run.offset, run.num_blocks) for run in part.runs
                )
            self._gathered = self._gathers.record_event()
        copied = torch.cuda.Event(blocking=True)
        targets = []
        with torch.cuda.stream(self._out):
            self._out.wait_event(self._gathered)
            if slot.host is not None:
                slot.host[:end].copy_(slot.words[:end], non_blocking=True)
            for at, words in _placed(ranges):
                staging, own = self._words[words], slice(at, at + words.stop - words.start)
                if slot.host is None:
                    staging.copy_(slot.words[own], non_blocking=True)
                else:
                    targets.append((staging, slot.host[own]))
            copied.record(self._out)
        slot.used = copied
        return _Arriving(copied) if slot.host is None else _Bouncing(copied, slot, targets)

    def scatter(self, parts: Sequence[LayerRun]) -> Copy:
        before = torch.cuda.current_stream(self._device).record_event()
        return self._scatter_one(parts[0], before) if len(parts) == 1 else self._join(parts, before)

    def _join(self, parts: Sequence[LayerRun], before: Any) -> Copy:
        """Scatters blocks of several layers through one slot."""
        ranges = [
            self._cache.word_range(one.layer, one.run.offset, one.run.num_blocks, one.heads)
            for one in parts
        ]
        slot = self._free_incoming()
        with torch.cuda.stream(self._in):
            if slot.used is not None:
                self._in.wait_event(slot.used)
            for at, words in _placed(ranges):
                source, own = self._words[words], slice(at, at + words.stop - words.start)
                assert own.stop <= len(slot.words), f"{own.stop} words in one scatter"
                if slot.host is not None:
                    source = slot.host[own].copy_(source)
                slot.words[own].copy_(source, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._in)
        end = 0
        with torch.cuda.stream(self._scatters):
            self._scatters.wait_event(before)
            self._scatters.wait_event(copied)
            for one, words in zip(parts, ranges, strict=True):
                begin, end = end, end + words.stop - words.start
                ids = one.blocks[one.run.begin : one.run.begin + one.run.num_blocks]
                rows = self._cache.rows(one.layer, slot.words[begin:end], one.heads)
                self._cache.view(one.layer, one.heads).index_copy_(0, ids, rows)
            slot.used = self._scattered = self._scatters.record_event()
        slot.read = copied
        return _Arriving(copied)

    def _free_incoming(self) -> _Slot:
        """Returns the next slot; the GPU no longer reads its host memory."""
        slot = next(self._incoming)
        if slot.host is not None and slot.read is not None:
            slot.read.synchronize()
        return slot

    def _scatter_one(self, part: LayerRun, before: Any) -> Copy:
        """Scatters blocks of one layer, through as many slots as they need."""
        layer, run, heads = part.layer, part.run, part.heads
        cache, word_bytes = self._cache.view(layer, heads), int(self._cache.word.itemsize)
        block, wanted = (each * word_bytes for each in self._cache.staged_words(layer, heads))
        # One copy for many blocks takes less time than a copy for each, even if it carries heads
        # between the wanted ones that other ranks take.
        most = 1 + (self._slot_bytes - wanted) // block
        for first in range(0, run.num_blocks, most):
            count, slot = min(most, run.num_blocks - first), self._free_incoming()
            offset = run.offset + first * block
            source = self._words[self._cache.word_range(layer, offset, count, heads)]
            scratch = slot.words[: len(source)]
            if slot.host is not None:
                source = slot.host[: len(source)].copy_(source)
            copied = torch.cuda.Event(blocking=True)
            with torch.cuda.stream(self._in):
                if slot.used is not None:
                    self._in.wait_event(slot.used)
                scratch.copy_(source, non_blocking=True)
                copied.record(self._in)
            with torch.cuda.stream(self._scatters):
                self._scatters.wait_event(before)
                self._scatters.wait_event(copied)
                begin = run.begin + first
                ids = part.blocks[begin : begin + count]
                cache.index_copy_(0, ids, self._cache.rows(layer, scratch, heads))
                slot.used = self._scattered = self._scatters.record_event()
            slot.read = copied
        return _Arriving(copied)

    def landing(self) -> Copy:
        landed = torch.cuda.Event(blocking=True)
        landed.record(self._scatters)
        return _Arriving(landed)

    def clear(self, block_ids: Sequence[int]) -> None:
        self.join_gathers()
        self.join_scatters()
        self._clear(block_ids)

    def clear_draft(self, block_ids: Sequence[int]) -> None:
        self._clear(block_ids, only_draft=True)

    def _clear(self, block_ids: Sequence[int], *, only_draft: bool = False) -> None:
        pinned = torch.tensor(block_ids, dtype=torch.int64, pin_memory=True)
        ids = pinned.to(self._device, non_blocking=True)
        for words in self._cache.cleared(only_draft=only_draft):
            words.index_fill_(0, ids, 0)

    def join_gathers(self) -> None:
        if self._gathered is not None:
            torch.cuda.current_stream(self._device).wait_event(self._gathered)

    def join_scatters(self) -> None:
        if self._scattered is not None:
            torch.cuda.current_stream(self._device).wait_event(self._scattered)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # A failed GPU reports its error again here; its copies are lost in any case.
        with contextlib.suppress(RuntimeError):
            for stream in (self._gathers, self._out, self._in, self._scatters):
                stream.synchronize()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._staging.data_ptr())

    def _slot(self) -> _Slot:
        num_words = self._slot_bytes // int(self._cache.word.itemsize)
        words = torch.empty(num_words, dtype=self._cache.word, device=self._device)
        host = None
        if not self._pinned:
            host = torch.empty(num_words, dtype=self._cache.word, pin_memory=True)
        return _Slot(words, host)


def _placed(ranges: Sequence[slice]) -> Iterator[tuple[int, slice]]:
    """Yields where each range of words begins if one follows the other.

    Ranges that follow each other in staging are joined, because every copy takes as long to launch.
    """
    at, end = 0, 0
    joined: slice | None = None
    for words in ranges:
        if joined is not None and joined.stop == words.start:
            joined = slice(joined.start, words.stop)
        else:
            if joined is not None:
                yield at, joined
            at, joined = end, words
        end += words.stop - words.start
    if joined is not None:
        yield at, joined


def scratch_bytes(block_bytes: int) -> int:
    """Returns the GPU memory of both scratch rings of one rank.

    Args:
        block_bytes: Bytes of the largest block of one layer on one rank.
    """
    return 2 * _NUM_SLOTS * scratch_slot_bytes(block_bytes, _SLOT_BYTES)


def scratch_slot_bytes(block_bytes: int, slot_bytes: int) -> int:
    """Returns the size of a slot: whole blocks of the largest size, at least one."""
    return max(1, slot_bytes // block_bytes) * block_bytes


def _pin(staging: torch.Tensor, device: torch.device) -> bool:
    """Pins memory that is already mapped readable and writable."""
    with torch.cuda.device(device):
        error = torch.cuda.cudart().cudaHostRegister(staging.data_ptr(), staging.numel(), 0)
        if error.value == 0:
            return True
        logger.warning(
            "staging cannot be pinned (%s): KV blocks take one more copy on the host",
            torch.cuda.cudart().cudaGetErrorString(error),
        )
        # CUDA reports a failed call again at the next kernel launch of this process, so clear it
        # here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)
        return False
