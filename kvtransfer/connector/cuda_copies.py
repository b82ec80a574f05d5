"""Copies of a cache that is in a GPU's memory.

Three streams beside the model's move the bytes, by events alone:

    kernels   gathers blocks into scratch and scatters scratch into blocks
    out       scratch to staging
    in        staging to scratch

The host waits for none of them while it launches a model; the model's stream waits for `kernels`
only (`join`), never for a bus.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from baton.kvtransfer.connector.block_copies import BlockCopies, Run
from baton.kvtransfer.connector.notifier import Copy
from baton.kvtransfer.connector.paged_cache import PagedCache
from baton.kvtransfer.engine_port import split_blocks
from baton.kvtransfer.frames import FRAME_TARGET_BYTES

# Of each ring of scratch. It bounds what a GPU has gathered and not yet copied out, so that a bus
# slower than the model holds up the model, not the memory; and how long after its gathers a step's
# bytes can be under way: 64 MiB, 40 ms over the slowest bus in use.
_NUM_SLOTS = 32
_SLOT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


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
    """Copies by the bus.

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
