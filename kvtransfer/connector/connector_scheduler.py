"""The connector beside vLLM's scheduler: what each step hands over, keeps and deletes.

Methods with vLLM's names are those of KVConnectorBase_V1, which say when vLLM calls them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

from baton.kvtransfer.connector.handoffs.handoff_scheduler import HandoffScheduler
from baton.kvtransfer.connector.step_metadata import RankReport, StepMetadata
from baton.kvtransfer.connector.step_report import StepReport
from baton.kvtransfer.connector.tiers.cache_drops import CacheDrops
from baton.kvtransfer.connector.tiers.cached_blocks import CachedBlocks
from baton.kvtransfer.connector.tiers.host_tier import HostTier
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.runtime.process import affinity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ConnectorScheduler:
    """BatonConnector's part beside vLLM's scheduler.

    Args:
        vllm_config: vLLM's configuration, with Baton's settings of the connector.
        kv_cache_config: vLLM's KV cache.
        layout: Layout of the KV cache of all ranks.
        port: This thread's connection to the transfer service; the caller closes it.

    Attributes:
        handoffs: Decides which handoffs each step sends and loads.
        copies_in_steps: Whether copies of handoffs take time of steps, as on a CPU.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        layout: KvLayout,
        port: EnginePort,
    ) -> None:
        # vLLM's scheduler spins while its ranks compute; it must not take their cores.
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        affinity.avoid_cores(extra["rank_cpus"])
        is_cpu = vllm_config.device_config.device_type == "cpu"
        self.copies_in_steps = bool(is_cpu and not layout.has_states)
        self.handoffs = HandoffScheduler(port, layout, copies_in_steps=self.copies_in_steps)
        # vLLM's events of one table stand for the prefix cache. A prefix that other tables have
        # lost is found when a request asks for it.
        self._indexed_table = layout.index_table.table
        self._cached = CachedBlocks(layout.index_table.block_size_tokens)
        self._cache_events: list[KVCacheEvent] = []
        self._host = HostTier.make(vllm_config, kv_cache_config, self._cached, layout.num_replicas)
        num_ranks = vllm_config.parallel_config.world_size
        self._drops = CacheDrops(self._cached, self.handoffs, self._host, num_ranks)
        self._limit_s = 0.0

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Takes the owner of the device's blocks; vLLM calls this before the first request."""
        self._manager = manager
        self.handoffs.bind(manager.block_pool)

    def on_new_request(self, request: Request) -> None:
        self._drops.add(request, self._manager)
        self.handoffs.add(request)
        if self._host is not None:
            self._host.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        handoffs = self.handoffs
        num_tokens = handoffs.num_loadable_tokens(request, num_computed_tokens)
        is_host = self._host is not None and not handoffs.receives(request.request_id)
        if self._host is not None and is_host:
            num_tokens = self._host.num_loadable_tokens(request, num_computed_tokens)
        if num_tokens is not None:
            num_held_tokens = num_computed_tokens + num_tokens
            if handoffs.end_if_uncached(request, num_held_tokens):
                return None, False
        return num_tokens, (is_host or handoffs.requests_wait) and bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids()
        if num_external_tokens and not self.handoffs.receives(request.request_id):
            assert self._host is not None, "the tokens come from a handoff or from host memory"
            self.handoffs.allocated(request, tables, 0)
            self._host.allocated(request, blocks, num_external_tokens)
        else:
            filled = self.handoffs.allocated(request, tables, num_external_tokens)
            if self._host is not None:
                self._host.overwritten(filled)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        step = self.handoffs.step(scheduler_output)
        is_idle = not scheduler_output.total_num_scheduled_tokens
        made = StepMetadata(
            step, clearing=self._drops.step(), is_idle=is_idle, limit_s=self._limit_s
        )
        if self._host is not None:
            self._host.overwritten(step.cleared)
            made.host = self._host.step(scheduler_output)
            made.disk = self._host.take_disk_orders()
        return made

    def has_pending_push_work(self) -> bool:
        is_host_busy = self._host is not None and self._host.has_work
        return self._drops.has_work or self.handoffs.has_work or is_host_busy

    def reset_cache(self) -> None:
        if self._host is not None:
            self._host.clear()

    def num_stored_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """See HostTier; 0 for a request that loads a handoff."""
        if self._host is None or self.handoffs.receives(request.request_id):
            return 0
        return self._host.num_stored_tokens(request, num_computed_tokens)

    def limit_step(self, limit_s: float) -> None:
        """Takes how long the next step may take, in seconds; 0: no limit is known."""
        self._limit_s = limit_s

    def finish_step(self) -> StepReport:
        """Ends the oldest unfinished step; returns what Baton's engine is told about it."""
        self._cache_events = self._manager.take_events()
        report = self.handoffs.finish_step()
        self._follow(self._cache_events)
        report.cache = self._cached.take()
        if self._host is not None:
            report.host_cache = self._cached.take_host()
            self._host.add_to(report)
        self._drops.add_to(report)
        return report

    def _follow(self, events: Iterable[KVCacheEvent]) -> None:
        """Takes the changes that these events make to the prefix cache."""
        for event in events:
            match event:
                case BlockStored(group_idx=self._indexed_table):
                    self._cached.stored(
                        event.parent_block_hash,
                        event.block_hashes,
                        event.token_ids,
                        event.extra_keys,
                        event.lora_name or "",
                    )
                case BlockRemoved(group_idx=self._indexed_table):
                    self._cached.removed(event.block_hashes)
                case AllBlocksCleared():
                    self._cached.cleared()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Returns the events of the step that `finish_step` has ended."""
        return self._cache_events

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, RankReport):
            self.handoffs.reported(told.loads, is_cut_off=told.is_cut_off)
            self._drops.reported(told.cleared)
        self.handoffs.loaded(connector_output.finished_recving or set())
        invalid = connector_output.invalid_block_ids
        untrusted = self.handoffs.distrust(invalid)
        if untrusted:
            self._manager.evict_blocks(untrusted)
        if self._host is not None:
            if untrusted or invalid:
                self._host.distrust({*untrusted, *invalid})
            report = told.host if isinstance(told, RankReport) else None
            self._host.reported(connector_output, report)
            if isinstance(told, RankReport) and told.disk is not None:
                self._host.disk_reported(told.disk)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        self.handoffs.finished(request, block_ids)
        if self._host is not None:
            self._host.finished(request)
