"""The connector class that vLLM loads: how a handoff enters and leaves vLLM.

vLLM makes one connector beside its scheduler (connector_scheduler.py) and one in every rank
(connector_worker.py). They share only the step metadata and the ranks' reports (step_metadata.py);
both talk to the worker's transfer service, which moves the bytes. Handoffs and fetches are in
handoffs/, the KV store in tiers/.

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
the rest. The holder runs a request for the same tokens and one more, which saves its cached
blocks; if some are missing, this request ends before it gets blocks. The blocks that a fetch leaves
out are held on the device while its request waits (kept_prefixes.py).

Keeping. Every full block is copied to host memory when it fills (host_tier.py), and from there to
disk (disk_tier.py). A request without a handoff loads blocks that the engine's cache lacks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import get_pp_group

from baton.kvtransfer import engine_groups
from baton.kvtransfer.connector.cache_groups import UnsupportedCache, named_groups
from baton.kvtransfer.connector.connector_scheduler import ConnectorScheduler
from baton.kvtransfer.connector.connector_worker import ConnectorWorker, is_first_rank
from baton.kvtransfer.connector.draft_layers import check_draft, draft_layers
from baton.kvtransfer.connector.step_metadata import StepMetadata
from baton.kvtransfer.connector.step_work import StepWork
from baton.kvtransfer.connector.tiers.host_tier import HOST_BYTES
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.pipeline_stages import stage_of, whole_model
from baton.runtime.kv.kv_groups import KvGroup
from baton.runtime.process import quick_exit

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class StepStats(KVConnectorStats):
    """An encoded StepReport, which vLLM carries to Baton's engine among its statistics."""

    def is_empty(self) -> bool:
        return not self.data


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """The class that vLLM loads; it passes each call to the part that the call is meant for.

    Attributes:
        connector_scheduler: The part beside vLLM's scheduler; None in a rank.
        connector_worker: The part in a rank; None beside vLLM's scheduler.

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
            named = named_groups(kv_cache_config, draft)
        except UnsupportedCache as error:
            raise ValueError(
                f"model {vllm_config.model_config.model} keeps {error} caches, which Baton does "
                "not hand over: serve it with plain vLLM"
            ) from error
        extra = self._kv_transfer_config.kv_connector_extra_config
        if role == KVConnectorRole.SCHEDULER:
            # Here kv_cache_config has only the layers of pipeline stage 0. The first rank, which
            # vLLM makes earlier, has recorded the groups of all stages.
            groups = engine_groups.recorded(extra["socket"])
        else:
            stages = _stages(list(named))
            groups = whole_model(stages)
        layout = KvLayout(**extra["layout"]).with_groups(groups)
        _check_replicas(vllm_config, kv_cache_config, layout)
        check_draft(layout)
        self._port = EnginePort(extra["socket"])
        self.connector_scheduler: ConnectorScheduler | None = None
        self.connector_worker: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = ConnectorScheduler(
                vllm_config, kv_cache_config, layout, self._port
            )
        else:
            layer_names = [name for of_group in named.values() for name in of_group]
            stage = stage_of(stages, get_pp_group().rank_in_group)
            self.connector_worker = ConnectorWorker(
                vllm_config, kv_cache_config, layer_names, layout, stage, self._port
            )
            if is_first_rank():
                engine_groups.record(extra["socket"], groups)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # vLLM's offloading copies whole blocks of a layer.
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        return "LBHNC" if extra.get(HOST_BYTES) else None

    @property
    def requires_kv_delivery(self) -> bool:
        # A send that ends incomplete makes the receiver recompute; the request does not fail.
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # Decode steps keep their full graphs: loads end before a model begins, and the layers for
        # which a graph does not call save_kv_layer are gathered by RankHandoffs.end_step.
        return False

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.shutdown()
        self._port.close()
        # vLLM calls this at the end of its process, in each rank first: the engine core waits for
        # the ranks, and the worker waits for the engine core. A process that ends with an error
        # ends in Python's normal way, so that the error is printed.
        if not isinstance(sys.exception(), Exception):
            quick_exit.skip_cleanup(0)

    # ---- ranks

    @property
    def _worker(self) -> ConnectorWorker:
        assert self.connector_worker is not None, "vLLM called a rank's method beside the scheduler"
        return self.connector_worker

    def _orders(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(self._orders())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker.start_load_kv(self._orders())

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        self._worker.save_kv_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.wait_for_save(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.get_transfer_results(self._orders(), finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.build_connector_worker_meta()

    # ---- scheduler

    @property
    def _scheduler(self) -> ConnectorScheduler:
        assert self.connector_scheduler is not None, "vLLM called the scheduler's method in a rank"
        return self.connector_scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.build_connector_meta(scheduler_output)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_pending_push_work()

    def reset_cache(self) -> bool | None:
        self._scheduler.reset_cache()
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        # vLLM calls both parts: the one beside the scheduler once per step, when the step ended.
        if self.connector_scheduler is None:
            return None
        return StepStats(self.connector_scheduler.finish_step().encode())

    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM calls this after get_kv_connector_stats, and publishes the events if it is configured
        # to (kv_events_config).
        return self._scheduler.take_events()

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.request_finished(request, block_ids)
        return False, None

    # ---- for Baton's scheduler (engine/vllm_scheduler.py)

    @property
    def copies_in_steps(self) -> bool:
        """See ConnectorScheduler."""
        return self._scheduler.copies_in_steps

    def num_stored_tokens(self, request: Request, num_computed_tokens: int) -> int:
        """See ConnectorScheduler."""
        return self._scheduler.num_stored_tokens(request, num_computed_tokens)

    def awaits_handoff(self, request_id: str) -> bool:
        """See HandoffScheduler.receives."""
        return self._scheduler.handoffs.receives(request_id)

    def is_on_its_way(self, request_id: str) -> bool:
        """See HandoffScheduler."""
        return self._scheduler.handoffs.is_on_its_way(request_id)

    def limit_step(self, limit_s: float) -> None:
        """See ConnectorScheduler."""
        self._scheduler.limit_step(limit_s)

    def latest_step_work(self) -> StepWork | None:
        """See HandoffScheduler."""
        return self._scheduler.handoffs.latest_step_work()


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
