"""Where vLLM's offloading keeps KV blocks in host memory, on CUDA GPUs and on CPUs.

vLLM's own store keeps GPU blocks in a file in /dev/shm, which a killed process leaves behind and
which containers limit to 64 MB. Each rank keeps its part in its own memory here.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
import numpy.typing as npt
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    TransferResult,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from baton.kvtransfer.connector.cached_blocks import CachedBlocks, Name


class HostBlocks(CPUOffloadingManager):
    """vLLM's table of blocks in host memory, which drops wrong blocks and reports its changes.

    Args:
        num_blocks: Number of blocks that the memory holds.
        reports: Receives the changes.
    """

    def __init__(self, num_blocks: int, reports: CachedBlocks) -> None:
        super().__init__(num_blocks)
        self._reports = reports
        # Blocks whose store is under way and whose content is wrong.
        self._wrong: set[OffloadKey] = set()

    def drop(self, keys: Collection[OffloadKey]) -> None:
        """Makes blocks whose store is under way unusable: their content is wrong."""
        self._wrong.update(keys)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = super().prepare_store(keys, req_context)
        if output is not None:
            self._reports.leave_host(_names(output.evicted_keys))
            self._reports.go_to_host(_names(output.keys_to_store))
        return output

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        wrong = [key for key in keys if not success or key in self._wrong]
        right = [key for key in keys if success and key not in self._wrong]
        self._wrong.difference_update(wrong)
        if wrong:
            super().complete_store(wrong, req_context, success=False)
            self._reports.leave_host(_names(wrong))
        if right:
            super().complete_store(right, req_context)
            self._reports.arrive_in_host(_names(right))

    def reset_cache(self) -> None:
        super().reset_cache()
        self._wrong.clear()
        self._reports.clear_host()


class HostMemory(CPUOffloadingSpec):
    """vLLM's offloading to host memory that belongs to each rank."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._reports: CachedBlocks | None = None
        self._blocks: HostBlocks | None = None

    def report_to(self, reports: CachedBlocks) -> None:
        """Sets the receiver of changes; called before `get_manager`."""
        self._reports = reports

    def _uses_shared_region(self) -> bool:
        return False

    def get_manager(self) -> HostBlocks:
        if self._blocks is None:
            # In a plain vLLM (bench/conversation.py) the changes are not read.
            reports = self._reports or CachedBlocks(self.tokens_per_block[0])
            self._blocks = HostBlocks(self.num_chunks, reports)
        return self._blocks

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cpu():
            return CpuCopies(kv_caches, self.num_chunks)
        return super().get_worker(kv_caches)


class CpuCopies(OffloadingWorker):
    """Copies between a cache of the CPU platform and host memory; each copy ends at once.

    The operating system provides the memory when it is first written.

    Args:
        caches: One rank's caches, of a single group.
        num_blocks: Number of blocks that the host memory holds.
    """

    def __init__(self, caches: CanonicalKVCaches, num_blocks: int) -> None:
        assert len(caches.group_data_refs) == 1, "Baton serves models with one group of caches"
        # numpy copies whole blocks; torch's indexing copies int8 values one by one, which takes ten
        # times as long.
        self._pairs = [
            (one.tensor.numpy(), np.empty((num_blocks, one.page_size_bytes), dtype=np.int8))
            for one in caches.tensors
        ]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src: GPULoadStoreSpec, dst: LoadStoreSpec) -> bool:
        cached, stored = _indices(src, dst)
        begun_at = time.monotonic()
        for cache, memory in self._pairs:
            memory[stored] = cache[cached]
        return self._end(job_id, len(cached), begun_at)

    def submit_load(self, job_id: int, src: LoadStoreSpec, dst: GPULoadStoreSpec) -> bool:
        cached, stored = _indices(dst, src)
        begun_at = time.monotonic()
        for cache, memory in self._pairs:
            cache[cached] = memory[stored]
        return self._end(job_id, len(cached), begun_at)

    def _end(self, job_id: int, num_blocks: int, begun_at: float) -> bool:
        num_bytes = num_blocks * sum(memory.shape[1] for _, memory in self._pairs)
        duration_s = time.monotonic() - begun_at
        self._ended.append(TransferResult(job_id, True, num_bytes, duration_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        return

    def shutdown(self) -> None:
        self._pairs = []


def _names(keys: Collection[OffloadKey]) -> list[Name]:
    """Returns the blocks' hashes as vLLM's cache events give them."""
    return [maybe_convert_block_hash(BlockHash(get_offload_block_hash(key))) for key in keys]


def _indices(
    cached: GPULoadStoreSpec, stored: LoadStoreSpec
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns the indices of the same blocks in the cache and in host memory."""
    assert isinstance(stored, CPULoadStoreSpec)
    assert len(stored.block_ids) == len(cached.block_ids)
    return cached.block_ids, stored.block_ids
