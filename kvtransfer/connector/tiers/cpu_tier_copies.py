"""Copies between a cache of the CPU platform and the KV store in host memory.

The rank's thread makes the copies at the end of each step, a bounded number of bytes per step: a
prompt of 30,000 tokens has hundreds of megabytes, and the streams of the step would wait for all of
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from baton.kvtransfer.connector.tiers.memory_ahead import MemoryAhead

# Most bytes that a short step copies: 1 or 2 ms. A step without streams and prompts delays no
# token.
STEP_BYTES, IDLE_STEP_BYTES = 8 * 2**20, 64 * 2**20
# Bytes that a long step may copy per second of its own time: the copies take a twentieth of it.
LONG_STEP_BYTES_PER_S = 200 * 2**20
# Speed of the copies, rather too low.
COPIED_BYTES_PER_S = 4 * 2**30


def step_bytes(step_s: float, *, is_idle: bool) -> int:
    """Returns the most bytes that a step may copy.

    Args:
        step_s: Time that the step has taken without the copies, in seconds.
        is_idle: Whether the step computes nothing.
    """
    if is_idle:
        return IDLE_STEP_BYTES
    return max(STEP_BYTES, int(step_s * LONG_STEP_BYTES_PER_S))


def stream_bytes(step_s: float, limit_s: float) -> int:
    """Returns the bytes that a step may copy for streams, which make no token before their load.

    Args:
        step_s: Time that the step has taken without the copies, in seconds.
        limit_s: Longest time of the step, its copies included; 0: none is known.
    """
    return max(0, int((limit_s - step_s) * COPIED_BYTES_PER_S))


@dataclass(slots=True)
class _Job:
    """A copy under way.

    Attributes:
        cached: Indices of the blocks in the cache.
        stored: Indices of the same blocks in host memory.
        is_store: Whether the blocks go to host memory.
        num_done: Number of blocks that are copied.
        seconds: Time that this has taken.
    """

    job_id: int
    cached: npt.NDArray[np.int32]
    stored: npt.NDArray[np.int32]
    is_store: bool
    num_done: int = 0
    seconds: float = 0.0


class CpuTierCopies(OffloadingWorker):
    """One rank's copies, in the order in which they were given.

    The operating system provides the memory as far as it is used, and a little ahead.

    Args:
        caches: The rank's caches, of a single group.
        num_blocks: Number of blocks that the host memory holds.

    Attributes:
        most_bytes: Most bytes that the step under way copies; at least one block is copied.
    """

    def __init__(self, caches: CanonicalKVCaches, num_blocks: int) -> None:
        assert len(caches.group_data_refs) == 1, "Baton serves models with one group of caches"
        # numpy copies whole blocks; torch's indexing copies int8 values one by one, which takes ten
        # times as long.
        self._pairs = [
            (one.tensor.numpy(), np.empty((num_blocks, one.page_size_bytes), dtype=np.int8))
            for one in caches.tensors
        ]
        self._ahead = MemoryAhead(self.memory)
        self._block_bytes = sum(memory.shape[1] for _, memory in self._pairs)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[TransferResult] = []
        self.most_bytes = STEP_BYTES

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        return self._submit(job_id, src, dst, is_store=True)

    def submit_load(self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, dst, src, is_store=False)

    def _submit(
        self, job_id: int, cached: GPULoadStoreSpec, stored: LoadStoreSpec, *, is_store: bool
    ) -> bool:
        assert isinstance(stored, CPULoadStoreSpec)
        assert len(stored.block_ids) == len(cached.block_ids)
        # vLLM gives blocks that were never used in ascending order.
        self._ahead.use(int(max(stored.block_ids, default=-1)) + 1)
        self._jobs[job_id] = _Job(job_id, cached.block_ids, stored.block_ids, is_store)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Makes this step's copies; vLLM calls this once per step, after the model."""
        left = max(1, self.most_bytes // self._block_bytes)
        for job in list(self._jobs.values()):
            left -= self._copy(job, left)
            if left <= 0:
                break
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Ends copies whose blocks in the cache get other owners in this step."""
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                self._copy(job, len(job.cached))

    def _copy(self, job: _Job, most: int) -> int:
        """Copies the next blocks of a job; returns how many, at most `most`."""
        begun_at = time.monotonic()
        part = slice(job.num_done, job.num_done + most)
        cached, stored = job.cached[part], job.stored[part]
        for cache, memory in self._pairs:
            if job.is_store:
                memory[stored] = cache[cached]
            else:
                cache[cached] = memory[stored]
        job.num_done += len(cached)
        job.seconds += time.monotonic() - begun_at
        if job.num_done == len(job.cached):
            del self._jobs[job.job_id]
            num_bytes = job.num_done * self._block_bytes
            self._ended.append(TransferResult(job.job_id, True, num_bytes, job.seconds))
        return len(cached)

    @property
    def memory(self) -> list[npt.NDArray[np.int8]]:
        """Host memory, one array of blocks per layer."""
        return [memory for _, memory in self._pairs]

    def shutdown(self) -> None:
        self._ahead.close()
        self._jobs.clear()
        self._pairs = []
