"""Builds vLLM's configuration from Baton's settings, and the layout that handoffs depend on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from vllm.config import ProfilerConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.platforms import Platform, current_platform
from vllm.utils.cpu_resource_utils import parse_id_list
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.selector import get_attn_backend

from baton.engine.base import EngineDead
from baton.engine.model_revision import model_revision, weights_revision
from baton.engine.served_model import ServedModel
from baton.engine.vllm_groups import all_stages
from baton.engine.vllm_lora import lora_args
from baton.engine.vllm_own_connector import OWN_ARGUMENTS, own_offloading
from baton.engine.vllm_refusals import (
    has_kv_draft,
    refuse_cache,
    refuse_data_parallel,
    refuse_model,
    refuse_settings,
    refuse_states,
)
from baton.engine.vllm_worker_extension import WorkerExtension
from baton.kvtransfer.connector.vllm_names import missing_attributes, missing_members, require
from baton.kvtransfer.layout import KvLayout
from baton.runtime.names import did_you_mean
from baton.runtime.process import affinity, worker_directory
from baton.v1 import common_pb2

_log = logging.getLogger(__name__)

_CACHE_SIZE_ARGS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")
_CPU_CACHE_BYTES = 2**30
_FINGERPRINT_USES = "the fingerprint of handoffs uses"
WORKER_EXTENSION = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"
# CUDA backends that store each token's keys, then its values, per head. In vLLM 0.32 they split the
# last axis of [blocks, heads, tokens, 2 * head size] in two halves (`do_kv_cache_update`). fp8
# changes the type of the values, which the fingerprint names too.
KEYS_THEN_VALUES = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})
# CUDA backends that store each token's latent, then its rotary key: the cache is written by vLLM's
# `concat_and_cache_mla` for all of them.
LATENT_THEN_ROPE = frozenset(
    {"FLASHMLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "CUTLASS_MLA", "TRITON_MLA"}
)
# Arguments that Baton sets itself. Users must not set them.
_OWN_ARGS = (
    "model",
    "tokenizer",
    "served_model_name",
    "scheduling_policy",
    "worker_extension_cls",
    "mm_processor_cache_gb",
)


class RefusingEngineArgs(AsyncEngineArgs):  # type: ignore[misc]
    """Refuses unsupported models as soon as vLLM has read the model's configuration.

    vLLM's next steps may fail for the same reason with a less helpful message.
    """

    def create_model_config(self) -> Any:
        """Raises EngineDead if Baton cannot serve the model."""
        model = super().create_model_config()
        refuse_model(model)
        refuse_data_parallel(model, self.data_parallel_size)
        return model


def checked_args(served: ServedModel, traces: Path) -> dict[str, Any]:
    """Returns the arguments of RefusingEngineArgs: the user's, and those that Baton sets.

    Args:
        served: The model, with the user's arguments.
        traces: Directory of profiles.

    Raises:
        EngineDead: vLLM does not know an argument, Baton sets it itself, or Baton refuses its
            value.
    """
    engine_args = served.engine_args
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in engine_args:
        if name in _OWN_ARGS:
            raise EngineDead(f"engine_args.{name}: is set by Baton and cannot be passed through")
        if name not in known:
            hint = did_you_mean(name, known)
            raise EngineDead(f"engine_args.{name}: is no vLLM engine argument{hint}")
    refuse_settings(engine_args)
    own_offloading(engine_args)
    # The settings of the user's connector go to Baton's connector (VllmSetup.make).
    passed = {name: one for name, one in engine_args.items() if name not in OWN_ARGUMENTS}
    args: dict[str, Any] = {
        "model": served.model,
        "served_model_name": served.served_name,
        # Both roles, so that a worker can change its role.
        "kv_transfer_config": {
            "kv_connector": "BatonConnector",
            "kv_connector_module_path": "baton.kvtransfer.connector.vllm_connector",
            "kv_role": "kv_both",
            # After a failed load vLLM ends the request, and VllmEngine runs it again without the
            # handoff. vLLM's own recompute would leave a seeded generator one draw ahead.
            "kv_load_failure_policy": "fail",
        },
        "scheduling_policy": "priority",
        "enable_log_requests": False,
        **lora_args(served.adapters, engine_args),
        "worker_extension_cls": WORKER_EXTENSION,
        # With such a cache, a request without pixels would fail in an engine core that has not seen
        # the image before.
        "mm_processor_cache_gb": 0,
        # Blocks that leave a window stay in the prefix cache until they are used again, so that a
        # prefix is found at every block, as the coordinator's index expects. By default vLLM finds
        # it only near the end of an earlier prompt.
        "prefix_cache_retention_interval": None,
        **passed,
        "profiler_config": _profiler_config(engine_args.get("profiler_config") or {}, traces),
    }
    if isinstance(given := args.get("speculative_config"), dict):
        # With EAGLE and MTP, vLLM does not use the last cached block of a prefix, because the
        # draft's entry of its last token depends on the next token. The coordinator counts on every
        # cached block, for what handoffs and fetches leave out; one entry costs few drafts.
        args["speculative_config"] = {"disable_eagle_block_drop": True, **given}
    if args.get("enable_prefix_caching") is not False:
        # The connector takes the collected events; vLLM need not publish them.
        events = {"enable_kv_cache_events": True, "publisher": "null"}
        args.setdefault("kv_events_config", events)
    if current_platform.is_cpu() and args.keys().isdisjoint(_CACHE_SIZE_ARGS):
        # By default vLLM takes most of the machine's memory, and the next worker on it would fail.
        args["kv_cache_memory_bytes"] = _CPU_CACHE_BYTES
    return args


def _profiler_config(given: dict[str, Any], traces: Path) -> ProfilerConfig:
    """Configures the profiler, which costs nothing until a profile is requested.

    Args:
        given: The user's profiler settings, by vLLM's names (`torch_profiler_with_stack` and
            others).
        traces: Directory of the profiles.

    Raises:
        EngineDead: vLLM does not know a setting, or Baton sets it itself.
    """
    # The worker compresses traces: ranks compute nothing while they write.
    own = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_use_gzip": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    for name in own.keys() & given.keys():
        raise EngineDead(f"engine_args.profiler_config.{name}: is set by Baton")
    # Python stacks make a trace several times as large, and its steps as slow.
    settings = {"torch_profiler_with_stack": False, **given, **own}
    try:
        return ProfilerConfig(**settings)
    except (TypeError, ValueError) as error:
        message = " ".join(str(error).split())
        raise EngineDead(f"engine_args.profiler_config: {message}") from None


def leave_room(cache: Any, num_bytes: int, total_bytes: int) -> None:
    """Makes vLLM leave memory of each GPU to Baton, which allocates it after vLLM's cache.

    A size that the user has given in bytes (`kv_cache_memory_bytes`) stays as it is.

    Args:
        cache: vLLM's CacheConfig.
        num_bytes: Bytes that Baton allocates on each GPU.
        total_bytes: Memory of one GPU.
    """
    share = cache.gpu_memory_utilization - num_bytes / total_bytes
    # vLLM itself reports a share that is too small for the model.
    cache.gpu_memory_utilization = max(share, 0.01)


def keep_sockets_in(directory: Path) -> None:
    """Makes vLLM put its Unix sockets and temporary files into a directory that Baton removes.

    vLLM creates two sockets per engine in the temporary directory, and a file through which ranks
    find each other (`get_file_store_init_method`), and leaves them there when it is killed. vLLM
    reads the directory only from the environment; Python has cached it in processes that vLLM
    forks. If the sockets' paths would be too long, this function changes nothing.
    """
    if not worker_directory.fits(directory):
        return
    os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
    # Compiled kernels stay where other workers find them.
    kept = Path(default_cache_dir()).resolve()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    # The same holds for torch's compiled C++ headers, which take ten seconds or more to compile.
    kept.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        Path(default_cache_dir()).symlink_to(kept, target_is_directory=True)


def bind_threads(config: Any) -> list[int]:
    """Binds each rank on a CPU to its share of this process's cores, unless the user has set it.

    vLLM's own choice keeps two cores free, which small machines do not have. vLLM reads this
    setting only from the environment.

    Returns:
        The cores on which ranks compute; empty on a GPU.
    """
    if config.device_config.device_type != "cpu":
        return []
    is_told = affinity.VLLM_BIND_THREADS in os.environ
    if not is_told:
        ranks = config.parallel_config.world_size
        shares = affinity.split_cores(sorted(os.sched_getaffinity(0)), ranks)
        os.environ[affinity.VLLM_BIND_THREADS] = "|".join(
            ",".join(map(str, share)) for share in shares
        )
    bound = os.environ[affinity.VLLM_BIND_THREADS]
    if bound in ("auto", "nobind"):
        return []
    cores = sorted({core for share in bound.split("|") for core in parse_id_list(share)})
    if (taken := affinity.claim_cores(cores)) and not is_told:
        _log.warning(
            "another worker of this host computes on cores %s too: give each its own, by "
            "`taskset -c` or %s",
            ",".join(map(str, taken)),
            affinity.VLLM_BIND_THREADS,
        )
    return cores


def layout_of(
    config: Any, served_name: str, adapters: Sequence[common_pb2.LoraAdapter] = ()
) -> KvLayout:
    """Returns the layout that every rank's cache must have; the connector checks the tensors.

    Its revision covers the model's weights and configuration, and the weights of the adapters:
    workers with others refuse the handoff.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    refuse_cache(cache, model)
    refuse_states(cache, model, parallel)
    has_attention = not model.is_attention_free
    backends = _attention_backends(config) if has_attention else []
    _fix_block_size(config, backends)
    heads = model.get_num_kv_heads(parallel) if has_attention else 0
    head_size = model.get_head_size() if has_attention else 0
    # Keys and values side by side or, with MLA, one latent from which both are computed.
    content = head_size if model.use_mla else 2 * head_size
    itemsize = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model).itemsize
    tp_size = parallel.tensor_parallel_size
    return KvLayout(
        model=served_name,
        revision=model_revision(model) + _adapters_suffix(adapters),
        dtype=_cache_dtype(cache, model),
        num_layers=model.get_num_layers(all_stages(parallel)),
        num_kv_heads=heads,
        head_size=head_size,
        block_size_tokens=cache.block_size,
        block_bytes=heads * cache.block_size * content * itemsize,
        axes=f"heads,tokens,content of {_content(config, backends)}{_states(cache, model)}",
        tp_size=tp_size,
        num_replicas=_num_replicas(config),
        draft_revision=_draft_revision(config.speculative_config),
        pp_size=parallel.pipeline_parallel_size,
    )


def _draft_revision(speculation: Any) -> str:
    """Returns the method and weights of a draft with a KV cache; empty without one.

    vLLM sets some of a draft's configuration by the worker's arguments, such as `max_model_len`. A
    draft with another configuration is right less often, and changes no output.

    Args:
        speculation: vLLM's SpeculativeConfig, or None.
    """
    if not has_kv_draft(speculation):
        return ""
    return f"{speculation.method} {weights_revision(speculation.draft_model_config)}"


def _num_replicas(config: Any) -> int:
    """Returns the number of neighbouring ranks that hold the same part of the cache.

    All ranks hold the same latents. If there are more ranks than KV heads, neighbouring ranks hold
    the same head (QKVParallelLinear of vllm/model_executor/layers/linear.py).
    """
    model, parallel = config.model_config, config.parallel_config
    tp_size = int(parallel.tensor_parallel_size)
    if model.use_mla:
        return tp_size
    if model.has_inner_state:
        # Every rank has its own part of the states.
        return 1
    heads = [
        model.model_arch_config[layer].total_num_kv_heads
        for layer in range(model.get_num_layers(all_stages(parallel)))
    ]
    if has_kv_draft(config.speculative_config):
        heads.append(config.speculative_config.draft_model_config.get_total_num_kv_heads())
    return math.gcd(*(max(1, tp_size // num_heads) for num_heads in heads))


def _states(cache: Any, model: Any) -> str:
    """Returns a name for how the kernels arrange recurrent states; empty for other models."""
    if not model.has_inner_state:
        return ""
    dtypes = f"{cache.mamba_cache_dtype},{cache.mamba_ssm_cache_dtype}"
    return f", states of {get_conv_state_layout()},{dtypes}"


def _cache_dtype(cache: Any, model: Any) -> str:
    if cache.cache_dtype == "auto":
        return str(model.dtype).removeprefix("torch.")
    # vLLM's short name for the same type.
    return "fp8_e4m3" if cache.cache_dtype == "fp8" else str(cache.cache_dtype)


def _attention_backends(config: Any) -> list[Any]:
    """Returns the backends that the layers will choose; windowed layers may have their own."""
    model = config.model_config
    if model.use_mla:
        num_heads = model.get_num_attention_heads(config.parallel_config)
        kind = {"use_mla": True, "num_heads": num_heads}
    else:
        kind = {"use_mm_prefix": model.is_mm_prefix_lm}
    with set_current_vllm_config(config):
        chosen = [
            get_attn_backend(
                model.get_head_size(),
                model.dtype,
                config.cache_config.cache_dtype,
                has_sliding_window=has_window,
                **kind,
            )
            for has_window in ((False, True) if model.get_sliding_window() else (False,))
        ]
    return list(dict.fromkeys(chosen))


def _fix_block_size(config: Any, backends: Sequence[Any]) -> None:
    """Makes the ranks use the block size of the fingerprint.

    Unless it is set, ranks choose the block size after they have loaded the model, by their
    attention kernel (FlashMLA: 64 tokens). On CPUs vLLM chooses it with the configuration.
    """
    cache = config.cache_config
    if not backends or cache.user_specified_block_size or current_platform.is_cpu():
        return
    names = ["_preferred_block_size_for_backends"]
    # An instance has every attribute: it returns None for a name that it does not know.
    require(missing_members({Platform: names}), _FINGERPRINT_USES, error=EngineDead)
    cache.block_size = current_platform._preferred_block_size_for_backends(
        backends, cache.DEFAULT_BLOCK_SIZE, config
    )
    cache.user_specified_block_size = True


def _content(config: Any, backends: Sequence[Any]) -> str:
    """Returns a name for how the attention kernels arrange a token's keys and values.

    Two backends may have blocks of one size whose bytes differ in meaning; so do the CPU's own
    kernels for different instruction sets. Backends of one arrangement have one name, so that
    workers on different GPUs (FlashAttention on one, FlashInfer on the other) accept each other.
    """
    model, cache = config.model_config, config.cache_config
    if not backends:
        return "nothing"
    if current_platform.is_cuda():
        return content_of([backend.get_name() for backend in backends])
    names = "+".join(backend.get_name() for backend in backends)
    if not current_platform.is_cpu() or model.use_mla:
        return names
    from vllm.v1.attention.backends import cpu_attn

    require(missing_attributes(cpu_attn, ["_get_attn_isa"]), _FINGERPRINT_USES, error=EngineDead)
    isa = cpu_attn._get_attn_isa(
        model.dtype, cache.block_size, model.get_head_size(), cache.cache_dtype
    )
    return f"{names}:{isa}"


def content_of(backends: Sequence[str]) -> str:
    """Returns the name of an arrangement on CUDA; that of the backends if it is not known.

    Args:
        backends: Names of the attention backends that the layers use.
    """
    if KEYS_THEN_VALUES.issuperset(backends):
        return "keys,values"
    if LATENT_THEN_ROPE.issuperset(backends):
        return "latent,rope"
    return "+".join(backends)


def _adapters_suffix(adapters: Sequence[common_pb2.LoraAdapter]) -> str:
    """Returns the end of the layout's revision, with a digest of the adapters; empty without."""
    if not adapters:
        return ""
    named = json.dumps([[one.name, one.revision] for one in adapters]).encode()
    return "+" + hashlib.sha256(named).hexdigest()[:8]
