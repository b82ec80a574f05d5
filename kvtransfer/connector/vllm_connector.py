"""The connector class that vLLM loads: how a handoff enters and leaves vLLM.

vLLM makes one connector beside its scheduler and one in every rank. These two halves share only the
step metadata that the scheduler's half writes; both talk to the worker's transfer service, which
moves the bytes.

Sending. In the step that computes them, each layer's finished blocks are gathered into the sender's
staging, which belongs to this handoff alone. Nothing reads the paged cache later (on a GPU: nothing
that the next step's kernels do not wait for), so a preemption or a freed block cannot put foreign
bytes into a handoff. Gathered blocks stay right when the request is preempted and its prompt is
computed again, so the send goes on with the first block that was not gathered. A speculative
draft's layers are gathered at the step's end (draft_layers.py).

Receiving. While the handoff is not committed, the connector tells the scheduler to ask again later,
and the request waits without blocks. Then the ranks load the whole handoff into the blocks that the
scheduler gives to the request. The request waits until they have, and other requests run meanwhile;
for caches with states, the step that first runs the request loads it.
Every failure (refused, expired, altered bytes) ends with the engine computing the prompt itself.

Fetching. A fetch is a handoff of whole blocks at the beginning of a prompt; the request computes
the rest. The holder runs a request for the same tokens and one more, which pushes its cached
blocks; if some are missing, this request ends before it gets blocks. The blocks that a fetch leaves
out are held on the device while its request waits (kept_prefixes.py).

Keeping. Every full block is copied to host memory when it fills (host_tier.py), and from there to
disk (disk_tier.py). A request without a handoff loads blocks that the engine's cache lacks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from baton.kvtransfer import engine_groups, engine_stages
from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.connector.cache_drops import CacheDrops, Clearing
from baton.kvtransfer.connector.cache_groups import UnsupportedCache, named_groups
from baton.kvtransfer.connector.cached_blocks import CachedBlocks
from baton.kvtransfer.connector.cpu_copies import CpuCopies, step_bytes, stream_bytes
from baton.kvtransfer.connector.disk_tier import SHUTDOWN_TIMEOUT_S, make_rank_disk
from baton.kvtransfer.connector.draft_layers import check_draft, draft_layers
from baton.kvtransfer.connector.handoff_step import HandoffStep, LoadReport
from baton.kvtransfer.connector.host_memory import host_layers
from baton.kvtransfer.connector.host_tier import HOST_BYTES, HostTier, make_rank_half
from baton.kvtransfer.connector.paged_cache import page_layout
from baton.kvtransfer.connector.rank_half import RankHalf
from baton.kvtransfer.connector.scheduler_half import SchedulerHalf
from baton.kvtransfer.connector.step_work import StepWork
from baton.kvtransfer.control import EnginePort
from baton.kvtransfer.disk.orders import DiskReport, Order
from baton.kvtransfer.disk.rank_disk import RankDisk
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.stages import stage_of, whole_model
from baton.runtime import affinity, quick_exit
from baton.runtime.kv_groups import KvGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
        OffloadingWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Step orders that vLLM carries from the scheduler's half to the ranks.

    Attributes:
        step: Work for handoffs.
        host: Copies from and to host memory; None without a host tier.
        disk: Orders for the ranks' disks.
        clearing: Blocks of host memory that an operator has deleted.
        is_idle: Whether the step computes nothing.
        limit_s: Longest time of the step that its streams allow; 0: none is known.
    """

    step: HandoffStep = field(default_factory=HandoffStep)
    host: OffloadingConnectorMetadata | None = None
    disk: list[Order] = field(default_factory=list)
    clearing: Clearing = field(default_factory=Clearing)
    is_idle: bool = False
    limit_s: float = 0.0


@dataclass
class RankReport(KVConnectorWorkerMetadata):
    """The ranks' report to the scheduler's half after a step."""

    loads: LoadReport
    is_cut_off: bool = False
    host: OffloadingWorkerMetadata | None = None
    disk: DiskReport | None = None
    cleared: list[int] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, RankReport)
        self.loads.add(other.loads)
        self.is_cut_off = self.is_cut_off or other.is_cut_off
        if self.host is None or other.host is None:
            self.host = self.host or other.host
        else:
            self.host = self.host.aggregate(other.host)
        if self.disk is None or other.disk is None:
            self.disk = self.disk or other.disk
        else:
            self.disk.add(other.disk)
        self.cleared += other.cleared
        return self


class StepStats(KVConnectorStats):
    """An encoded StepReport, which vLLM carries to Baton's engine among its statistics."""

    def is_empty(self) -> bool:
        return not self.data


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """The class that vLLM loads; each method belongs to one half.

    Raises:
        ValueError: The model has caches that Baton does not hand over, or ranks hold other parts of
            the cache than the fingerprint says.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # The worker has checked the model's configuration; this checks the cache itself.
        draft = draft_layers(vllm_config, kv_cache_config)
        try:
            self._named = named_groups(kv_cache_config, draft)
        except UnsupportedCache as error:
            raise ValueError(
                f"model {vllm_config.model_config.model} keeps {error} caches, which Baton does "
                "not hand over: serve it with plain vLLM"
            ) from error
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._socket_path = extra["socket"]
        if role == KVConnectorRole.SCHEDULER:
            # Its own configuration has the layers of the first stage. The ranks were made before.
            groups = engine_groups.recorded(self._socket_path)
        else:
            stages = _stages(list(self._named))
            groups = whole_model(stages)
        self._layout = KvLayout(**extra["layout"]).with_groups(groups)
        _check_replicas(vllm_config, kv_cache_config, self._layout)
        check_draft(self._layout)
        self._port = EnginePort(self._socket_path)
        self._scheduler: SchedulerHalf | None = None
        self._cache_events: list[KVCacheEvent] = []
        # vLLM's events of one table stand for the prefix cache. A prefix that other tables have
        # lost is found when a request asks for it.
        self._indexed_table = self._layout.index_table.table
        self._cached = CachedBlocks(self._layout.index_table.block_size_tokens)
        self._ranks: RankHalf | None = None
        self._host: HostTier | None = None
        self._host_copies: OffloadingConnectorWorker | None = None
        self._rank_disk: RankDisk | None = None
        self._host_layers: list[npt.NDArray[np.int8]] = []
        # Orders of an operator whose last block this rank has overwritten.
        self._cleared: list[int] = []
        self._step_began_at = self._limit_s = 0.0
        if role == KVConnectorRole.SCHEDULER:
            # vLLM's scheduler spins while its ranks compute; it must not take their cores.
            affinity.avoid_cores(extra["rank_cpus"])
            self._scheduler = SchedulerHalf(
                self._port, self._layout, copies_in_steps=self.copies_in_steps
            )
            self._host = HostTier.make(
                vllm_config, kv_cache_config, self._cached, self._layout.num_replicas
            )
            num_ranks = vllm_config.parallel_config.world_size
            self._drops = CacheDrops(self._cached, self._scheduler, self._host, num_ranks)
        else:
            self._ranks = RankHalf(
                self._socket_path,
                self._port,
                get_tensor_model_parallel_rank(),
                self._layout,
                stage_of(stages, get_pp_group().rank_in_group),
            )
            self._host_copies = make_rank_half(vllm_config, kv_cache_config)
            self._note_stage(engine_stages.WEIGHTS)
            if _is_first_rank():
                engine_groups.record(self._socket_path, groups)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # vLLM's offloading copies whole blocks of a layer.
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return "LBHNC" if extra.get(HOST_BYTES) else None

    @property
    def requires_kv_delivery(self) -> bool:
        # A push that ends incomplete makes the receiver recompute; the request does not fail.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # Decode steps keep their full graphs: loads end before a model begins, and the layers for
        # which a graph does not call save_kv_layer are gathered by RankHalf.end_step.
        return False

    def shutdown(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        if self._rank_disk is not None:
            self._rank_disk.close(SHUTDOWN_TIMEOUT_S)
        if self._host_copies is not None:
            self._host_copies.shutdown()
        self._port.close()
        # vLLM calls this at the end of its process, in each rank first: the engine core waits for
        # the ranks, and the worker waits for the engine core. A process that ends with an error
        # ends in Python's normal way, so that the error is printed.
        if not isinstance(sys.exception(), Exception):
            quick_exit.skip_cleanup(0)

    # ---- ranks

    @property
    def _rank_half(self) -> RankHalf:
        assert self._ranks is not None, "vLLM called a rank's method beside the scheduler"
        return self._ranks

    def _orders(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _note_stage(self, stage: str) -> None:
        if _is_first_rank():
            engine_stages.record(self._socket_path, stage)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Layers that use another layer's cache are not among the names.
        names = [name for of_group in self._named.values() for name in of_group]
        self._rank_half.register({name: kv_caches[name] for name in names})
        if self._host_copies is not None:
            self._host_copies.register_kv_caches(kv_caches)
            assert self._host_copies.worker is not None, "vLLM makes it for these caches"
            extra = self._kv_transfer_config.kv_connector_extra_config
            rank = get_tensor_model_parallel_rank()
            in_order = {
                name: kv_caches[name]
                for group in self._kv_cache_config.kv_cache_groups
                for name in group.layer_names
            }
            layout = page_layout(in_order, self._kv_cache_config.num_blocks)
            self._rank_disk = make_rank_disk(extra, rank, self._host_copies.worker, layout)
            self._host_layers = host_layers(self._host_copies.worker)
        self._note_stage(engine_stages.KV)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        # vLLM calls this first in every step: copies of blocks that get new owners end here.
        assert isinstance(kv_connector_metadata, StepMetadata)
        clearing = kv_connector_metadata.clearing
        for slot in clearing.slots:
            for layer in self._host_layers:
                layer[slot] = 0
        self._cleared += clearing.ended
        if self._host_copies is not None:
            self._host_copies.handle_preemptions(kv_connector_metadata.host)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._step_began_at = time.monotonic()
        self._rank_half.begin_step(self._orders().step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._host_copies is not None:
            self._host_copies.start_kv_transfers(self._orders().host)
        if self._rank_disk is not None:
            self._rank_disk.submit(self._orders().disk)
        self._rank_half.load(self._orders().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self._rank_half.save(layer_name)

    def wait_for_save(self) -> None:
        self._rank_half.end_step()
        if self._host_copies is not None:
            self._host_copies.prepare_store_kv(self._orders().host)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        # On a CPU, loads of handoffs and copies of host memory share the bytes of a step. Loads of
        # streams may take all the time that the step has left.
        orders, step_s = self._orders(), time.monotonic() - self._step_began_at
        most_bytes = step_bytes(step_s, is_idle=orders.is_idle)
        copied = self._rank_half.copy_waited(most_bytes, stream_bytes(step_s, orders.limit_s))
        most_bytes = max(most_bytes - copied, most_bytes // 2)
        if self._host_copies is not None and isinstance(self._host_copies.worker, CpuCopies):
            self._host_copies.worker.most_bytes = most_bytes
        ended, failed = self._rank_half.take_ended()
        if self._host_copies is None:
            return KVConnectorTransferResults(set(), ended, failed)
        sent, received = self._host_copies.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received | ended, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank_half.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report, is_cut_off = self._rank_half.take_report(), not self._rank_half.alive
        host = self._host_copies.build_connector_worker_meta() if self._host_copies else None
        disk = self._rank_disk.take_report() if self._rank_disk is not None else None
        cleared, self._cleared = self._cleared, []
        if not (report or is_cut_off or host or disk or cleared):
            return None
        return RankReport(report, is_cut_off, host, disk, cleared)

    # ---- scheduler

    @property
    def _scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "vLLM called the scheduler's method in a rank"
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        self._drops.add(request, self._known_cache_manager)
        self._scheduler_half.add(request)
        if self._host is not None:
            self._host.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._scheduler_half
        num_tokens = half.num_loadable_tokens(request, num_computed_tokens)
        is_host = self._host is not None and not half.receives(request.request_id)
        if self._host is not None and is_host:
            num_tokens = self._host.num_loadable_tokens(request, num_computed_tokens)
        if num_tokens is not None:
            num_held_tokens = num_computed_tokens + num_tokens
            if half.end_if_uncached(request, num_held_tokens):
                return None, False
        return num_tokens, (is_host or half.requests_wait) and bool(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        tables = blocks.get_block_ids()
        if num_external_tokens and not self._scheduler_half.receives(request.request_id):
            assert self._host is not None, "the tokens come from a handoff or from host memory"
            self._scheduler_half.allocated(request, tables, 0)
            self._host.allocated(request, blocks, num_external_tokens)
        else:
            filled = self._scheduler_half.allocated(request, tables, num_external_tokens)
            if self._host is not None:
                self._host.overwritten(filled)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        step = self._scheduler_half.step(scheduler_output)
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
        return self._drops.has_work or (self._host is not None and self._host.has_work)

    def reset_cache(self) -> bool | None:
        if self._host is not None:
            self._host.clear()
        return True

    def num_stored_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """Tells Baton's scheduler (engine/vllm_scheduler.py); see HostTier."""
        if self._host is None or self._scheduler_half.receives(request.request_id):
            return 0
        return self._host.num_stored_tokens(request, num_computed_tokens)

    def awaits_handoff(self, request_id: str) -> bool:
        """Tells Baton's scheduler (engine/vllm_scheduler.py); see SchedulerHalf.receives."""
        return self._scheduler_half.receives(request_id)

    def is_on_its_way(self, request_id: str) -> bool:
        """Tells Baton's scheduler (engine/vllm_scheduler.py); see SchedulerHalf.is_on_its_way."""
        return self._scheduler_half.is_on_its_way(request_id)

    @property
    def copies_in_steps(self) -> bool:
        """Tells Baton's scheduler whether copies of handoffs take time of steps, as on a CPU."""
        is_cpu = self._vllm_config.device_config.device_type == "cpu"
        return bool(is_cpu and not self._layout.has_states)

    def limit_step(self, limit_s: float) -> None:
        """Takes from Baton's scheduler how long the next step may take; 0: no limit is known."""
        self._limit_s = limit_s

    def latest_step_work(self) -> StepWork | None:
        """Tells Baton's scheduler (engine/vllm_scheduler.py); see SchedulerHalf."""
        return self._scheduler_half.latest_step_work()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # vLLM calls both halves; the scheduler's half once per step, when the step has finished.
        if self._scheduler is None:
            return None
        self._cache_events = self._known_cache_manager.take_events()
        report = self._scheduler.finish_step()
        report.cache = self._cache_change(self._cache_events)
        if self._host is not None:
            report.host_cache = self._cached.take_host()
            self._host.add_to(report)
        self._drops.add_to(report)
        return StepStats(report.encode())

    def _cache_change(self, events: Sequence[KVCacheEvent]) -> CacheChange | None:
        """Returns the change that these events make to the prefix cache; None for no change."""
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
        return self._cached.take()

    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM calls this after get_kv_connector_stats, and publishes the events if it is configured
        # to (kv_events_config).
        return self._cache_events

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_half.bind(kv_cache_manager.block_pool)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, RankReport):
            self._scheduler_half.reported(told.loads, is_cut_off=told.is_cut_off)
            self._drops.reported(told.cleared)
        self._scheduler_half.loaded(connector_output.finished_recving or set())
        invalid = connector_output.invalid_block_ids
        untrusted = self._scheduler_half.distrust(invalid)
        if untrusted:
            self._known_cache_manager.evict_blocks(untrusted)
        if self._host is not None:
            if untrusted or invalid:
                self._host.distrust({*untrusted, *invalid})
            report = told.host if isinstance(told, RankReport) else None
            self._host.reported(connector_output, report)
            if isinstance(told, RankReport) and told.disk is not None:
                self._host.disk_reported(told.disk)

    @property
    def _known_cache_manager(self) -> KVCacheManager:
        assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
        return self._kv_cache_manager

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_half.finished(request, block_ids)
        if self._host is not None:
            self._host.finished(request)
        return False, None


def _is_first_rank() -> bool:
    return bool(get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0)


def _stages(own: list[KvGroup]) -> list[list[KvGroup]]:
    """Returns the groups of layers of each pipeline stage, in their order.

    Every rank calls it at the same time, because stages tell each other.

    Args:
        own: The groups of this rank's stage.

    Raises:
        ValueError: A stage has no layer with a cache, so it would never end its part of a handoff.
    """
    if get_pp_group().world_size == 1:
        return [own]
    stages: list[Any] = [None] * get_pp_group().world_size
    torch.distributed.all_gather_object(stages, own, group=get_pp_group().cpu_group)
    for index, groups in enumerate(stages):
        if not groups:
            raise ValueError(
                f"pipeline_parallel_size is {len(stages)}; stage {index} has no layer with a KV "
                "cache: lower it"
            )
    return stages


def _check_replicas(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, layout: KvLayout
) -> None:
    """Raises ValueError if a shard's ranks cannot hold the same part of the cache.

    vLLM counts only ranks that hold the same latents. Ranks that hold the same KV head have no
    other head.
    """
    replicas, expected = kv_cache_config.kv_tp_replicas, layout.num_replicas
    has_one_head = all(group.num_kv_heads == 1 for group in layout.groups)
    if replicas % expected and (vllm_config.model_config.use_mla or not has_one_head):
        raise ValueError(
            f"{replicas} ranks hold the same part of the cache; must be a multiple of the "
            f"fingerprint's {expected}"
        )
