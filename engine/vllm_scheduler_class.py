"""Chooses the class of vLLM's scheduler, and checks that this vLLM has the names that it uses."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request
from vllm.v1.structured_output.request import StructuredOutputRequest

from baton.engine.base import EngineDead
from baton.engine.vllm_load_failures import PlainAsyncScheduler, PlainScheduler
from baton.engine.vllm_scheduler import STEPS, BatonAsyncScheduler, BatonScheduler
from baton.engine.vllm_step_targets import make_targets_file
from baton.kvtransfer.connector.vllm_names import (
    changed_methods,
    missing_assignments,
    missing_members,
    require,
)
from baton.runtime.steps.latency import LatencyModel

_log = logging.getLogger(__name__)

# The names of vLLM that Baton's scheduler uses: methods, properties and fields.
_MEMBERS: dict[type, tuple[str, ...]] = {
    Scheduler: ("schedule", "update_from_output"),
    Request: ("num_tokens", "num_tokens_with_spec", "num_output_tokens", "has_encoder_inputs"),
    KVCacheManager: ("get_computed_blocks",),
    KVCacheBlocks: ("blocks",),
    KVCacheBlock: ("ref_cnt", "is_null"),
    BlockPool: ("get_num_free_blocks",),
    StructuredOutputRequest: ("grammar",),
    LoRAConfig: ("max_loras",),
    SchedulerConfig: ("long_prefill_token_threshold", "max_num_batched_tokens"),
    LoRARequest: ("lora_int_id",),
}
# Private methods that Baton's scheduler overrides, with their parameters.
_HOOKS = {
    "_handle_blocked_waiting_request": ["self", "request"],
    "_mamba_block_aligned_split": [
        "self",
        "request",
        "num_new_tokens",
        "num_new_local_computed_tokens",
        "num_external_computed_tokens",
    ],
    "_try_schedule_encoder_inputs": [
        "self",
        "request",
        "num_computed_tokens",
        "num_new_tokens",
        "encoder_compute_budget",
        "shift_computed_tokens",
    ],
    "_reserve_prefill_lookahead": ["self", "request", "num_computed_tokens", "num_new_tokens"],
}
# The same for the mixin of all schedulers.
_LOAD_FAILURE_HOOKS = {
    "_handle_invalid_blocks": ["self", "invalid_block_ids", "num_scheduled_tokens"],
}
# Attributes of instances. The check looks for the assignments in the code, because it runs before
# there are instances, in the worker's process.
_ATTRIBUTES: dict[type, tuple[str, ...]] = {
    Scheduler: (
        "max_num_scheduled_tokens",
        "max_num_active_reqs",
        "num_spec_tokens",
        "deferred_waiting",
        "kv_holding_waiting",
        "finished_recving_kv_req_ids",
        "grammar_compile_error_reqs",
        "kv_cache_manager",
        "waiting",
        "running",
        "requests",
        "connector",
        "lora_config",
        "scheduler_config",
        "adaptive_long_prefill_threshold",
    ),
    Request: (
        "num_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "kv_transfer_params",
        "arrival_time",
        "priority",
        "status",
        "structured_output_request",
        "lora_request",
    ),
    KVCacheManager: ("block_pool", "coordinator"),
    KVCacheCoordinator: ("single_type_managers",),
    SingleTypeKVCacheManager: ("block_size", "max_admission_blocks_per_request"),
}


def use_scheduler(config: Any, prior: LatencyModel | None, transfer_socket: str) -> None:
    """Chooses the class of vLLM's scheduler; each of them knows failed loads (TableLoadFailures).

    Args:
        config: vLLM's VllmConfig, with Baton's connector.
        prior: Latency model until steps are measured; None: steps have no limit.
        transfer_socket: Control socket of the worker's transfer service.

    Raises:
        EngineDead: The installed vLLM lacks a name that the class uses.
    """
    require(changed_methods(Scheduler, _LOAD_FAILURE_HOOKS), "handoffs use", error=EngineDead)
    scheduling, is_async = config.scheduler_config, config.scheduler_config.async_scheduling
    chosen: type | None = None
    if prior is not None:
        if scheduling.enable_chunked_prefill:
            _prepare_step_budget(config, prior, transfer_socket)
            chosen = BatonAsyncScheduler if is_async else BatonScheduler
        else:
            # vLLM never starts a prompt that gets fewer tokens than it has.
            _log.info(
                "steps have no limit: vLLM computes each prompt of this model in a single step"
            )
    if chosen is None and scheduling.scheduler_cls is None:
        chosen = PlainAsyncScheduler if is_async else PlainScheduler
    if chosen is not None:
        scheduling.scheduler_cls = f"{chosen.__module__}.{chosen.__qualname__}"


def _prepare_step_budget(config: Any, prior: LatencyModel, transfer_socket: str) -> None:
    """Checks vLLM's names, and passes the settings of the step budget to the scheduler's process.

    Raises:
        EngineDead: The installed vLLM lacks a name that Baton's scheduler uses.
    """
    missing = [
        *missing_members(_MEMBERS),
        *missing_assignments(_ATTRIBUTES),
        *changed_methods(Scheduler, _HOOKS),
    ]
    way_out = "set steps.scheduler to vllm"
    require(missing, "Baton's scheduler uses", or_else=way_out, error=EngineDead)
    make_targets_file(transfer_socket)
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra[STEPS] = {"socket": transfer_socket, "prior": dataclasses.asdict(prior)}
