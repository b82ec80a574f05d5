"""Where vLLM's offloading keeps KV blocks in host memory, on CUDA GPUs and on CPUs.

vLLM's own store keeps GPU blocks in a file in /dev/shm, which a killed process leaves behind and
which containers limit to 64 MB. Each rank keeps its part in its own memory here.
Blocks in host memory are also written to disk, if the disk tier is on (kvtransfer/disk).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    get_offload_block_hash,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks, Name
from baton.kvtransfer.connector.tiers.cpu_tier_copies import CpuTierCopies
from baton.kvtransfer.connector.vllm_names import missing_attributes, require
from baton.kvtransfer.disk.index import DiskIndex
from baton.kvtransfer.disk.orders import BlockName, BlockSelection, DiskReport

# Share of the blocks in host memory that may be on their way to disk at a time, and share of those
# that may be on their way from disk; the rest stays for the engine.
_MOST_BUSY = 0.25
# Blocks of host memory that ranks overwrite in one step; a block takes less than a millisecond.
_CLEARED_PER_STEP = 16
# Names of vLLM's policies of eviction that HostBlocks uses: their tables of blocks.
_POLICY_NAMES = {"lru": ("chunks",), "arc": ("t1", "t2")}
# Copies between host memory and disk belong to no request.
_NO_REQUEST = ReqContext("")


class HostBlocks(CPUOffloadingManager):
    """vLLM's table of blocks in host memory, which drops wrong blocks and reports its changes.

    With a disk, each block is written there once, when host memory has it: later, when host memory
    evicts it, its place is needed at once, and a worker that is killed would lose all of them.

    Args:
        num_blocks: Number of blocks that the memory holds.
        reports: Receives the changes.
        disk: Blocks on disk; None: there is no disk tier.
        eviction_policy: vLLM's name of the order of eviction: "lru" or "arc".
    """

    # vLLM's names that this class uses; HostTier checks them.
    PRIVATE = (
        "_policy",
        "_num_chunks",
        "_num_allocated_chunks",
        "_num_evictable_cache_chunks",
        "_free_list",
        "_prepare_load",
    )
    _num_allocated_chunks: int
    _free_list: list[int]
    _num_evictable_cache_chunks: int

    def __init__(
        self,
        num_blocks: int,
        reports: CachedBlocks,
        disk: DiskIndex | None = None,
        eviction_policy: str = "lru",
    ) -> None:
        super().__init__(num_blocks, eviction_policy)
        self._policy_names = _POLICY_NAMES[eviction_policy]
        self._reports = reports
        # Blocks whose store is under way and whose content is wrong.
        self._wrong: set[OffloadKey] = set()
        self.disk = disk
        # Blocks in use that are deleted as soon as they are not, and places whose bytes must be
        # overwritten before other blocks get them.
        self._doomed: set[OffloadKey] = set()
        self._uncleared: deque[int] = deque()

    @staticmethod
    def most_busy(num_blocks: int) -> int:
        """Returns how many blocks of host memory may be on their way to disk, or from disk."""
        return max(1, int(_MOST_BUSY * num_blocks))

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
        doomed = [key for key in keys if key in self._doomed]
        keys = [key for key in keys if key not in self._doomed]
        wrong = [key for key in keys if not success or key in self._wrong]
        right = [key for key in keys if success and key not in self._wrong]
        if doomed:
            self._wrong.difference_update(doomed)
            super().complete_store(doomed, req_context)
            self._delete_unused(doomed)
        self._wrong.difference_update(wrong)
        if wrong:
            super().complete_store(wrong, req_context, success=False)
            self._reports.leave_host(_names(wrong))
        if right:
            super().complete_store(right, req_context)
            self._reports.arrive_in_host(_names(right))
            self._write_to_disk(right)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        super().complete_load(keys, req_context)
        if self._doomed:
            self._delete_unused([key for key in keys if key in self._doomed])

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if key in self._doomed:
            return LookupResult.MISS
        found = super().lookup(key, req_context)
        lost = self.disk is not None and self.disk.is_lost(key)
        return LookupResult.MISS if found is LookupResult.HIT_PENDING and lost else found

    def reset_cache(self) -> None:
        busy = set(self._uncleared)
        if self.disk is not None:
            # A rank may still read or write these: `disk_reported` frees them.
            busy |= self.disk.slots
            self.disk.host_emptied()
            self.disk.clear()
        num_allocated = self._num_allocated_chunks
        super().reset_cache()
        self._num_allocated_chunks = num_allocated
        self._free_list = [slot for slot in range(num_allocated) if slot not in busy]
        self._wrong.clear()
        self._doomed.clear()
        self._reports.clear_host()

    # ---- Deletion

    def delete(self, selection: BlockSelection) -> int:
        """Deletes blocks, and those of which Baton's hash and the owner are not known.

        Blocks in use are deleted as soon as they are not.

        Returns:
            How many blocks are deleted.
        """
        keys = self._held_keys()
        doomed = [
            key
            for key, name in zip(keys, _names(keys), strict=True)
            if self._reports.is_selected(name, selection)
        ]
        self._doomed.update(doomed)
        self._delete_unused(doomed)
        return len(doomed)

    def _held_keys(self) -> list[OffloadKey]:
        """Returns the keys of all blocks."""
        return [key for name in self._policy_names for key in getattr(self._policy, name)]

    @property
    def missing(self) -> list[str]:
        """The private names that the installed vLLM lacks."""
        policy = getattr(self, "_policy", None)
        return [
            *missing_attributes(self, self.PRIVATE),
            *missing_attributes(policy, self._policy_names),
        ]

    def _delete_unused(self, keys: Sequence[OffloadKey]) -> None:
        """Deletes those doomed blocks that are not in use."""
        unused = [key for key in keys if self._policy.get(key).ref_cnt == 0]
        for key in unused:
            self._uncleared.append(self._policy.get(key).chunk_id)
            self._policy.remove(key)
        self._num_evictable_cache_chunks -= len(unused)
        self._doomed.difference_update(unused)
        self._reports.leave_host(_names(unused))

    @property
    def is_deleting(self) -> bool:
        """Whether deleted blocks are in use, or their bytes are still there.

        Blocks that a disk that hangs keeps in use do not count: they may be so forever.
        """
        stuck = self.disk.slots if self.disk is not None and self.disk.hangs else ()
        in_use = any(self._policy.get(key).chunk_id not in stuck for key in self._doomed)
        return in_use or bool(self._uncleared)

    def take_uncleared(self) -> list[int]:
        """Returns places that ranks must overwrite before anything else in the next step."""
        count = min(len(self._uncleared), _CLEARED_PER_STEP)
        slots = [self._uncleared.popleft() for _ in range(count)]
        self._free_list += slots
        return slots

    # ---- Disk

    def _write_to_disk(self, keys: Sequence[OffloadKey]) -> None:
        """Begins to write blocks in host memory, as far as the disk takes them now."""
        if self.disk is None:
            return
        wanted = [key for key in keys if key not in self._doomed and self.disk.accepts(key)]
        for key, name in zip(wanted, _names(wanted), strict=True):
            described = self._reports.described(name)
            if self.disk.accepts(key) and described is not None:
                spec = self._prepare_load([key], _NO_REQUEST, record_access=False)
                self.disk.write(BlockName(key, *described), _slots(spec)[0])

    def used(self, keys: Sequence[OffloadKey]) -> None:
        """Notes that a request with these blocks has ended, for the disk.

        Blocks in host memory that found the disk busy before get another chance.
        """
        if self.disk is not None:
            held = ((key, self._policy.get(key)) for key in keys)
            self._write_to_disk([key for key, one in held if one is not None and one.is_ready])
            self.disk.used(keys)

    def load_from_disk(
        self, keys: Sequence[OffloadKey], req_context: ReqContext
    ) -> set[OffloadKey] | None:
        """Begins to load a prompt's next blocks to host memory; returns the blocks of these loads.

        Args:
            keys: The blocks that the prompt needs, in their order.
            req_context: Belongs to the request.

        Returns:
            None: the next block is on disk, and the loads under way are as many as may be.
        """
        disk = self.disk
        assert disk is not None, "asked only with a disk"
        wanted: list[OffloadKey] = []
        most = self.most_busy(self._num_chunks) - disk.num_loads
        num_new, is_cut = 0, False
        for key in keys:
            if self._policy.get(key) is None:
                is_cut = key in disk and num_new >= most
                if key not in disk or is_cut:
                    break
                num_new += 1
            wanted.append(key)
        if not num_new:
            return None if is_cut else set()
        # Blocks of the prompt that are in host memory must stay: vLLM evicts none of these keys.
        output = super().prepare_store(wanted, req_context)
        if output is None:
            return set()
        self._reports.leave_host(_names(output.evicted_keys))
        loaded = output.keys_to_store
        for key, name, slot in zip(loaded, _names(loaded), _slots(output.store_spec), strict=True):
            self._reports.come_from_disk(name, disk.get(key))
            disk.load(key, slot)
        return set(loaded)

    def disk_reported(self, report: DiskReport) -> None:
        """Takes the ranks' report on their disks."""
        assert self.disk is not None, "ranks report only with a disk"
        for ended in self.disk.reported(report):
            key = OffloadKey(ended.key)
            if not ended.wanted:
                self._free_list.append(ended.slot)
            elif ended.is_load:
                self.complete_store([key], _NO_REQUEST, success=ended.done)
            else:
                self.complete_load([key], _NO_REQUEST)


class HostMemory(CPUOffloadingSpec):
    """vLLM's offloading to host memory that belongs to each rank."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._reports: CachedBlocks | None = None
        self._disk: DiskIndex | None = None
        self._blocks: HostBlocks | None = None

    def report_to(self, reports: CachedBlocks, disk: DiskIndex | None) -> None:
        """Sets the receiver of changes and the disk; called before `get_manager`."""
        self._reports, self._disk = reports, disk

    def _uses_shared_region(self) -> bool:
        return False

    def get_manager(self) -> HostBlocks:
        if self._blocks is None:
            # In a plain vLLM (bench/conversation.py) the changes are not read.
            reports = self._reports or CachedBlocks(self.tokens_per_block[0])
            self._blocks = HostBlocks(self.num_chunks, reports, self._disk, self.eviction_policy)
        return self._blocks

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if current_platform.is_cpu():
            return CpuTierCopies(kv_caches, self.num_chunks)
        return super().get_worker(kv_caches)


def host_layers(worker: OffloadingWorker) -> list[npt.NDArray[np.int8]]:
    """Returns a rank's host memory, one array of blocks per layer.

    Raises:
        ValueError: The installed vLLM keeps it under another name.
    """
    if isinstance(worker, CpuTierCopies):
        return worker.memory
    if getattr(getattr(worker, "_store_handler", None), "dst_tensors", None) is None:
        require_names([f"{type(worker).__name__}._store_handler.dst_tensors"])
    return [layer.numpy() for layer in worker._store_handler.dst_tensors]


def require_names(missing: Sequence[str]) -> None:
    """Raises ValueError if vLLM lacks private names that the KV store uses."""
    user = "the KV store in host memory uses"
    require(missing, user, or_else="set kv_store.host_bytes to 0")


def host_pages(layers: Sequence[npt.NDArray[np.int8]]) -> Callable[[int], Sequence[memoryview]]:
    """Returns the function that gives a block of host memory, one buffer per layer."""
    return lambda slot: [memoryview(layer[slot]).cast("B") for layer in layers]


def _slots(spec: LoadStoreSpec) -> list[int]:
    assert isinstance(spec, CPULoadStoreSpec)
    return [int(slot) for slot in spec.block_ids]


def _names(keys: Collection[OffloadKey]) -> list[Name]:
    """Returns the blocks' hashes as vLLM's cache events give them."""
    return [maybe_convert_block_hash(BlockHash(get_offload_block_hash(key))) for key in keys]
