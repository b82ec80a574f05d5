"""The connector in each rank: copies between the rank's cache, staging and host memory.

vLLM calls a rank a worker. Methods with vLLM's names are those of KVConnectorBase_V1, which say
when vLLM calls them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from baton.kvtransfer import start_phases
from baton.kvtransfer.connector.handoffs.paged_cache import page_layout
from baton.kvtransfer.connector.handoffs.rank_handoffs import RankHandoffs
from baton.kvtransfer.connector.step_metadata import RankReport, StepMetadata
from baton.kvtransfer.connector.tiers.cpu_tier_copies import CpuTierCopies, step_bytes, stream_bytes
from baton.kvtransfer.connector.tiers.disk_tier import SHUTDOWN_TIMEOUT_S, make_rank_disk
from baton.kvtransfer.connector.tiers.host_memory import host_layers
from baton.kvtransfer.connector.tiers.host_tier import make_host_tier_worker
from baton.kvtransfer.disk.rank_disk import RankDisk
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.pipeline_stages import PipelineStage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def is_first_rank() -> bool:
    """Whether this process is the first of all ranks."""
    return bool(get_pp_group().is_first_rank and get_tensor_model_parallel_rank() == 0)


class ConnectorWorker:
    """BatonConnector's part in one rank.

    Args:
        vllm_config: vLLM's configuration, with Baton's settings of the connector.
        kv_cache_config: vLLM's KV cache of this rank.
        layer_names: Layers of this rank that have a cache, by vLLM's names.
        layout: Layout of the KV cache of all ranks.
        stage: Pipeline stage of the rank.
        port: This thread's connection to the transfer service; the caller closes it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        layer_names: Iterable[str],
        layout: KvLayout,
        stage: PipelineStage,
        port: EnginePort,
    ) -> None:
        self._kv_cache_config, self._layer_names = kv_cache_config, list(layer_names)
        self._extra: dict[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._rank = get_tensor_model_parallel_rank()
        self._handoffs = RankHandoffs(self._extra["socket"], port, self._rank, layout, stage)
        self._host_tier = make_host_tier_worker(vllm_config, kv_cache_config)
        self._rank_disk: RankDisk | None = None
        self._host_layers: list[npt.NDArray[np.int8]] = []
        # Orders of an operator whose last block this rank has overwritten.
        self._cleared: list[int] = []
        self._step_began_at = 0.0
        self._note_phase(start_phases.WEIGHTS)

    def _note_phase(self, phase: str) -> None:
        if is_first_rank():
            start_phases.record(self._extra["socket"], phase)

    def shutdown(self) -> None:
        self._handoffs.close()
        if self._rank_disk is not None:
            self._rank_disk.close(SHUTDOWN_TIMEOUT_S)
        if self._host_tier is not None:
            self._host_tier.shutdown()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        # Layers that use another layer's cache are not among the names.
        self._handoffs.register({name: kv_caches[name] for name in self._layer_names})
        if self._host_tier is not None:
            self._host_tier.register_kv_caches(kv_caches)
            assert self._host_tier.worker is not None, "vLLM makes it for these caches"
            in_order = {
                name: kv_caches[name]
                for group in self._kv_cache_config.kv_cache_groups
                for name in group.layer_names
            }
            layout = page_layout(in_order, self._kv_cache_config.num_blocks)
            worker = self._host_tier.worker
            self._rank_disk = make_rank_disk(self._extra, self._rank, worker, layout)
            self._host_layers = host_layers(worker)
        self._note_phase(start_phases.KV)

    def handle_preemptions(self, orders: StepMetadata) -> None:
        # vLLM calls this first in every step: copies of blocks that get new owners end here.
        for slot in orders.clearing.slots:
            for layer in self._host_layers:
                layer[slot] = 0
        self._cleared += orders.clearing.ended
        if self._host_tier is not None:
            self._host_tier.handle_preemptions(orders.host)

    def begin_step(self, orders: StepMetadata) -> None:
        """Takes the orders of a step, before its model runs."""
        self._step_began_at = time.monotonic()
        self._handoffs.begin_step(orders.handoffs)

    def start_load_kv(self, orders: StepMetadata) -> None:
        if self._host_tier is not None:
            self._host_tier.start_kv_transfers(orders.host)
        if self._rank_disk is not None:
            self._rank_disk.submit(orders.disk)
        self._handoffs.load(orders.handoffs)

    def save_kv_layer(self, layer_name: str) -> None:
        self._handoffs.save(layer_name)

    def wait_for_save(self, orders: StepMetadata) -> None:
        self._handoffs.end_step()
        if self._host_tier is not None:
            self._host_tier.prepare_store_kv(orders.host)

    def get_transfer_results(
        self, orders: StepMetadata, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        # On a CPU, loads of handoffs and copies of host memory share the bytes of a step. Loads of
        # streams may take all the time that the step has left.
        step_s = time.monotonic() - self._step_began_at
        most_bytes = step_bytes(step_s, is_idle=orders.is_idle)
        copied = self._handoffs.copy_waited(most_bytes, stream_bytes(step_s, orders.limit_s))
        most_bytes = max(most_bytes - copied, most_bytes // 2)
        if self._host_tier is not None and isinstance(self._host_tier.worker, CpuTierCopies):
            self._host_tier.worker.most_bytes = most_bytes
        ended, failed = self._handoffs.take_ended()
        if self._host_tier is None:
            return KVConnectorTransferResults(set(), ended, failed)
        sent, received = self._host_tier.get_finished(finished_req_ids)
        return KVConnectorTransferResults(sent, received | ended, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._handoffs.take_invalid_block_ids()

    def build_connector_worker_meta(self) -> RankReport | None:
        report, is_cut_off = self._handoffs.take_report(), not self._handoffs.alive
        host = self._host_tier.build_connector_worker_meta() if self._host_tier else None
        disk = self._rank_disk.take_report() if self._rank_disk is not None else None
        cleared, self._cleared = self._cleared, []
        if not (report or is_cut_off or host or disk or cleared):
            return None
        return RankReport(report, is_cut_off, host, disk, cleared)
