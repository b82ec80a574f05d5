"""Keeps a copy of every full KV block in host memory, by vLLM's offloading.

Every full block of a prompt or an answer is copied to host memory, once, after the step that
computed it. A prompt whose first blocks are in the engine's cache loads the blocks after them from
host memory. It waits with its blocks reserved, and the other requests go on meanwhile.

vLLM's OffloadingConnector does the same; its two halves run inside Baton's connector here, and not
beside it in a MultiConnector, for these reasons. A request that loads a handoff must not ask for
host memory at the same time. Blocks that a handoff failed to fill must not be stored: vLLM would
store them under a valid name. The coordinator needs to know which blocks can be found.

With a disk (connector/disk_tier.py), a prompt whose next block is there waits without blocks of the
engine's cache until host memory has the block.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    DirectionalTransferStats,
    OffloadingWorkerMetadata,
    TransferStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import RequestStatus

from baton.kvtransfer.connector.step_report import HostLoad, StepReport
from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks
from baton.kvtransfer.connector.tiers.disk_loads import DiskLoads
from baton.kvtransfer.connector.tiers.disk_tier import DiskTier
from baton.kvtransfer.connector.tiers.host_memory import HostBlocks, HostMemory, require_names
from baton.kvtransfer.connector.tiers.load_counts import LoadCounts
from baton.kvtransfer.connector.vllm_names import missing_attributes, missing_members
from baton.kvtransfer.disk.orders import BlockSelection, DiskReport, Order

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# Key in kv_connector_extra_config, by vLLM's name: bytes of host memory of all ranks.
HOST_BYTES = "cpu_bytes_to_use"

logger = logging.getLogger(__name__)

# Fields of vLLM's private state that HostTier uses.
_FIELDS: dict[type, tuple[str, ...]] = {
    TransferJobStatus: ("is_store", "keys", "deferred_fence_block_ids"),
    RequestOffloadState: (
        "req_context",
        "group_states",
        "max_offload_tokens",
        "num_locally_computed_tokens",
        "transfer_jobs",
    ),
    RequestGroupState: ("offload_keys",),
    OffloadingWorkerMetadata: ("transfer_stats",),
    TransferStats: ("load",),
    DirectionalTransferStats: ("bytes", "time"),
}
# Attributes of vLLM's OffloadingConnectorScheduler that HostTier uses.
_ATTRIBUTES = ("_jobs", "_req_status", "_current_batch_allocated_block_ids")


def host_options(host_bytes: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of kv_connector_extra_config that turn the host tier on.

    Args:
        host_bytes: Host memory of all ranks in bytes.
        settings: The user's settings of vLLM's OffloadingConnector, by vLLM's names.
    """
    # By default vLLM keeps prompts only. The next turn of a conversation needs the answers too.
    return {HOST_BYTES: host_bytes, "offload_prompt_only": False, **settings}


def _memory(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> HostMemory | None:
    """Returns the host memory; None if it is off, holds no block, or does not fit the cache."""
    if not vllm_config.kv_transfer_config.kv_connector_extra_config.get(HOST_BYTES):
        return None
    # The scheduler's configuration has the first layer's specification in place of several.
    specs = [
        spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        for spec in (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    ]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        logger.warning(
            "kv_store.host_bytes is not used: it keeps caches whose layers keep every token, and "
            "this model has %s",
            ", ".join(sorted({type(spec).__name__ for spec in specs})),
        )
        return None
    memory = HostMemory(build_offloading_config(vllm_config, kv_cache_config))
    return memory if memory.num_chunks else None


class HostTier:
    """Runs beside vLLM's scheduler: decides which blocks each step stores and loads.

    Args:
        memory: Description of the host memory.
        scheduler: vLLM's part beside its scheduler.
        num_replicas: Number of ranks that hold the same keys and values.
        disk: The tier below; None: there is none.
    """

    def __init__(
        self,
        memory: HostMemory,
        scheduler: OffloadingConnectorScheduler,
        num_replicas: int,
        disk: DiskTier | None = None,
    ) -> None:
        self._blocks = memory.get_manager()
        self._scheduler = scheduler
        self._disk = disk
        # Loads that requests have begun since the last step, by the engine's request id.
        self._loads: dict[str, HostLoad] = {}
        self._counts = LoadCounts(memory.config.parallel.world_size, num_replicas)
        # Blocks loaded from disk, by the engine's request id.
        self._disk_loads: dict[str, DiskLoads] = {}

    @classmethod
    def make(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        reports: CachedBlocks,
        num_replicas: int,
    ) -> HostTier | None:
        """Returns None if the tier is off or its memory holds no block.

        Raises:
            ValueError: The installed vLLM lacks a name that this class uses.
        """
        memory = _memory(vllm_config, kv_cache_config)
        if memory is None:
            return None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        disk = DiskTier.make(extra, memory)
        memory.report_to(reports, disk.index if disk is not None else None)
        scheduler = OffloadingConnectorScheduler(memory, vllm_config, kv_cache_config)
        require_names(_missing(scheduler))
        return cls(memory, scheduler, num_replicas, disk)

    def add(self, request: Request) -> None:
        """Takes a request that was given to the engine."""
        self._scheduler.on_new_request(request)

    def num_loadable_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Returns how many tokens a request loads after those in the engine's cache.

        None: the blocks are on their way; vLLM asks again.
        """
        if self._waits_for_disk(request, num_computed_tokens):
            return None
        num_tokens: int | None
        num_tokens, _ = self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        return num_tokens

    def _waits_for_disk(self, request: Request, num_computed_tokens: int) -> bool:
        """Begins to load the blocks on disk that a waiting request needs next.

        Returns:
            Whether the request must wait until others have loaded theirs.
        """
        state = self._scheduler._req_status.get(request.request_id)
        if self._disk is None or state is None or request.skip_reading_prefix_cache:
            return False
        self._disk.poll()
        loads = self._disk_loads.setdefault(request.request_id, DiskLoads())
        if state.transfer_jobs:
            return False
        state.update_offload_keys()
        keys = state.group_states[0].offload_keys[num_computed_tokens // self._block_tokens :]
        return loads.load(self._blocks, keys, state.req_context, time.monotonic())

    @property
    def _block_tokens(self) -> int:
        size: int = self._scheduler.config.kv_group_configs[0].tokens_per_chunk
        return size

    def num_stored_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Returns about how many tokens a waiting request would load; changes nothing."""
        state = self._scheduler._req_status.get(request.request_id)
        if state is None or request.skip_reading_prefix_cache:
            return 0
        state.update_offload_keys()
        size, on_disk = self._block_tokens, self._blocks.disk
        num_found = 0
        for key in state.group_states[0].offload_keys[num_computed_tokens // size :]:
            found = self._blocks.lookup(key, state.req_context)
            if found is not LookupResult.HIT and (on_disk is None or key not in on_disk):
                break
            num_found += 1
        return num_found * size

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_loaded_tokens: int) -> None:
        """Takes the blocks of a request that loads this many tokens from host memory."""
        num_from_disk = 0
        if (loads := self._disk_loads.get(request.request_id)) is not None:
            state, size = self._scheduler._req_status[request.request_id], self._block_tokens
            first = state.num_locally_computed_tokens // size
            keys = state.group_states[0].offload_keys[first:][: num_loaded_tokens // size]
            num_from_disk = size * len(loads.keys.intersection(keys))
        self._loads[request.request_id] = HostLoad(num_loaded_tokens, num_from_disk)
        self._scheduler.update_state_after_alloc(request, blocks, num_loaded_tokens)

    def overwritten(self, block_ids: Iterable[int]) -> None:
        """Takes blocks of the device that get other bytes in the step that is made next.

        A block's copy to host memory may go on after its request has ended, and must end first.
        vLLM sees to that for the blocks of requests that it schedules or that load from host
        memory. It does not know of loads of handoffs, and of blocks that are cleared.

        Args:
            block_ids: Blocks of the engine's cache.
        """
        self._scheduler._current_batch_allocated_block_ids.update(block_ids)

    def step(self, output: SchedulerOutput) -> OffloadingConnectorMetadata:
        """Returns the copies of a step that vLLM has scheduled, and those that wait for it."""
        return self._scheduler.build_connector_meta(output)

    def distrust(self, block_ids: Collection[int]) -> None:
        """Drops what was copied from blocks whose content turned out wrong.

        Called before `reported` takes the same step's report. Copies of these blocks cannot have
        ended before: a rank begins to store a block at the earliest in the step after the one that
        fills it.

        Args:
            block_ids: Blocks of the engine's cache.
        """
        wrong = set(block_ids)
        for job in self._scheduler._jobs.values():
            if job.is_store and not wrong.isdisjoint(job.deferred_fence_block_ids or ()):
                self._blocks.drop(job.keys)

    def reported(self, output: KVConnectorOutput, report: OffloadingWorkerMetadata | None) -> None:
        """Takes the ranks' report on copies that have ended."""
        if report is not None:
            load = report.transfer_stats.load
            self._counts.add("host", load.bytes, load.time)
            output = replace(output, kv_connector_worker_meta=report)
            self._scheduler.update_connector_output(output)

    def finished(self, request: Request) -> None:
        """Takes the end of a request."""
        self._disk_loads.pop(request.request_id, None)
        if request.status == RequestStatus.FINISHED_ERROR:
            # Its blocks may be wrong; vLLM would store them as if its prompt had been computed.
            state = self._scheduler._req_status.get(request.request_id)
            if state is not None:
                state.max_offload_tokens = 0
        self._scheduler.request_finished(request)
        if self._disk is not None:
            state = self._scheduler._req_status.get(request.request_id)
            if state is not None:
                self._blocks.used(state.group_states[0].offload_keys)

    def parents_on_disk(self) -> Iterator[tuple[int, int]]:
        """Yields the blocks on disk; see DiskIndex.parents."""
        return self._disk.index.parents() if self._disk is not None else iter(())

    def delete(self, selection: BlockSelection) -> tuple[int, int, int | None]:
        """Deletes blocks in host memory and on disk; those in use as soon as they are not.

        Returns:
            How many blocks are deleted in host memory and on disk, and the argument of
            `take_deleted`.
        """
        num_host = self._blocks.delete(selection)
        if self._disk is None:
            return num_host, 0, None
        num_disk, deletion = self._disk.index.delete(selection)
        return num_host, num_disk, deletion

    def take_deleted(self, deletion: int | None) -> bool | None:
        """Returns whether the ranks' disks have deleted everything; see DiskIndex.take_deleted.

        Args:
            deletion: A result of `delete`; None: there is no disk.
        """
        if self._disk is None or deletion is None:
            return True
        return self._disk.index.take_deleted(deletion)

    @property
    def is_deleting(self) -> bool:
        """Whether host memory has bytes of deleted blocks; see HostBlocks."""
        return self._blocks.is_deleting

    def take_uncleared(self) -> list[int]:
        """Returns places that ranks overwrite first in the next step; see HostBlocks."""
        return self._blocks.take_uncleared()

    def take_disk_orders(self) -> list[Order]:
        """Returns the orders to the ranks' disks of the step that is made next."""
        return self._disk.take_orders() if self._disk is not None else []

    def add_to(self, report: StepReport) -> None:
        """Adds the loads since the last step, and the changes of the disk."""
        report.host_loads, self._loads = self._loads, {}
        report.tier_loads = self._counts.take()
        # vLLM's OffloadingConnectorScheduler collects figures until they are taken.
        self._scheduler.get_stats()
        if self._disk is not None:
            self._disk.add_to(report)

    @property
    def has_work(self) -> bool:
        """Whether copies are under way, for which the engine must go on stepping."""
        return bool(
            self._scheduler.has_pending_push_work()
            or (self._disk is not None and self._disk.has_orders)
        )

    def disk_reported(self, report: DiskReport) -> None:
        """Takes the ranks' report on their disks."""
        self._counts.add("disk", report.loaded_bytes, report.load_s)
        self._blocks.disk_reported(report)

    def clear(self) -> None:
        """Forgets all blocks."""
        self._scheduler.reset_cache()


def _missing(scheduler: OffloadingConnectorScheduler) -> list[str]:
    assert isinstance(scheduler.manager, HostBlocks), "HostMemory makes no other"
    return [
        *missing_members(_FIELDS),
        *missing_attributes(scheduler, _ATTRIBUTES),
        *scheduler.manager.missing,
    ]


def make_host_tier_worker(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> OffloadingConnectorWorker | None:
    """Returns vLLM's copier of one rank; None if the tier is off or its memory is too small."""
    memory = _memory(vllm_config, kv_cache_config)
    if memory is None:
        return None
    return OffloadingConnectorWorker(memory, vllm_config, kv_cache_config)
