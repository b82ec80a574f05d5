"""Configures vLLM to use Baton's scheduler, if this vLLM has everything that the class uses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import re
from typing import Any

import vllm
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request
from vllm.v1.structured_output.request import StructuredOutputRequest

from baton.engine import vllm_scheduler
from baton.engine.base import EngineDead
from baton.engine.vllm_step_targets import make_targets_file
from baton.runtime.latency import LatencyModel

_log = logging.getLogger(__name__)

# The names of vLLM that Baton's scheduler uses: methods, properties and fields, with the parameters
# of the private methods that it overrides.
_METHODS: dict[type, tuple[str, ...]] = {
    Scheduler: (
        "schedule",
        "update_from_output",
        "_handle_blocked_waiting_request",
        "_mamba_block_aligned_split",
        "_try_schedule_encoder_inputs",
        "_reserve_prefill_lookahead",
    ),
    Request: ("num_tokens", "num_tokens_with_spec", "num_output_tokens", "has_encoder_inputs"),
    KVCacheManager: ("get_computed_blocks",),
    KVCacheBlocks: ("blocks",),
    KVCacheBlock: ("ref_cnt", "is_null"),
    BlockPool: ("get_num_free_blocks",),
    StructuredOutputRequest: ("grammar",),
    LoRAConfig: ("max_loras",),
    LoRARequest: ("lora_int_id",),
}
_HOOK_PARAMETERS = {
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


def use_step_budget(config: Any, prior: LatencyModel, transfer_socket: str) -> None:
    """Makes vLLM use Baton's scheduler, unless vLLM computes each prompt in a single step.

    Args:
        config: vLLM's VllmConfig, with Baton's connector.
        prior: Latency model until steps are measured.
        transfer_socket: Control socket of the worker's transfer service.

    Raises:
        EngineDead: The installed vLLM lacks a name that Baton's scheduler uses.
    """
    scheduling = config.scheduler_config
    if not scheduling.enable_chunked_prefill:
        # vLLM never starts a prompt that gets fewer tokens than it has.
        _log.info("steps have no limit: vLLM computes each prompt of this model in a single step")
        return
    if missing := _missing():
        raise EngineDead(
            f"vLLM {vllm.__version__} lacks {', '.join(missing)}, which Baton's scheduler uses; "
            "install the version that Baton requires, or set steps.scheduler to vllm"
        )
    make_targets_file(transfer_socket)
    scheduler = (
        vllm_scheduler.BatonAsyncScheduler
        if scheduling.async_scheduling
        else vllm_scheduler.BatonScheduler
    )
    scheduling.scheduler_cls = f"{scheduler.__module__}.{scheduler.__qualname__}"
    extra = config.kv_transfer_config.kv_connector_extra_config
    extra[vllm_scheduler.STEPS] = {"socket": transfer_socket, "prior": dataclasses.asdict(prior)}


def _missing() -> list[str]:
    found = [
        f"{owner.__name__}.{name}"
        for owner, names in _METHODS.items()
        for name in names
        if not hasattr(owner, name) and name not in inspect.get_annotations(owner)
    ]
    found += [
        f"{owner.__name__}.{name}"
        for owner, names in _ATTRIBUTES.items()
        for name in names
        if not re.search(rf"\bself\.{name}\b[^=\n]*=[^=]", _source(owner))
    ]
    found += [
        f"Scheduler.{name}({', '.join(parameters)})"
        for name, parameters in _HOOK_PARAMETERS.items()
        if (hook := getattr(Scheduler, name, None)) is not None
        and list(inspect.signature(hook).parameters) != parameters
    ]
    return found


@functools.cache
def _source(owner: type) -> str:
    """Returns the code of a class, which takes tens of milliseconds to find."""
    return inspect.getsource(owner)
