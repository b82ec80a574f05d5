"""Refuses models that vLLM serves and Baton cannot hand over, by name, before weights are loaded.

Baton hands over paged caches with keys and values or with latents (MLA), also of sliding windows,
and recurrent states, rank by rank, on one host. vLLM itself does not refuse the other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.engine.base import EngineDead

_EVERY_TOKEN = "each rank must hold every token of what it hands over"
# Engine arguments that must be 1, with the reason.
_ONE_ONLY = {
    "prefill_context_parallel_size": _EVERY_TOKEN,
    "decode_context_parallel_size": _EVERY_TOKEN,
    "nnodes": "every rank must be on its worker's host",
}
# Executors that may place ranks on other hosts.
_REMOTE_EXECUTORS = ("ray", "external_launcher")
# Speculative methods whose draft has no KV cache of its own.
_CACHELESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})
# Those whose draft has layers in the block tables of the model's layers.
_KV_DRAFTS = frozenset({"eagle", "eagle3", "mtp", "draft_model"})
# Quantized cache types that have the same size for every token.
_QUANTIZED = ("fp8", "fp8_e4m3", "fp8_e5m2")


def refuse_settings(engine_args: Mapping[str, Any]) -> None:
    """Refuses settings that spread a worker over hosts, or that change cache or scheduling.

    Raises:
        EngineDead: Names the argument, its value, and what to do.
    """
    for name, why in _ONE_ONLY.items():
        if (size := engine_args.get(name, 1)) != 1:
            raise EngineDead(
                f"engine_args.{name}: is {size}; Baton supports 1, because {why}: leave it out, "
                "or serve the model with plain vLLM"
            )
    if (backend := engine_args.get("distributed_executor_backend")) in _REMOTE_EXECUTORS:
        _refuse_executor(f"is {backend!r}")
    if (scheduler := engine_args.get("scheduler_cls")) is not None:
        raise EngineDead(
            f"engine_args.scheduler_cls: is {scheduler!r}; Baton supports its own and vLLM's, "
            "because handoffs are loaded and sent by what they do in a step: set steps.scheduler"
        )


def refuse_executor(parallel: Any) -> None:
    """Refuses an executor that vLLM itself has chosen: Ray's, in a Ray placement group.

    Args:
        parallel: vLLM's ParallelConfig.

    Raises:
        EngineDead: Names the argument and what to do.
    """
    if parallel.use_ray:
        _refuse_executor("is not set, and vLLM has chosen Ray")


def _refuse_executor(state: str) -> None:
    raise EngineDead(
        f"engine_args.distributed_executor_backend: {state}; Baton supports mp and uni, because "
        "every rank must be on its worker's host: set it to mp (`launcher: ray` starts whole "
        "workers on other hosts)"
    )


def refuse_cache(cache: Any, model: Any) -> None:
    """Refuses cache types that need more than the cache's blocks, or differ between layers.

    Args:
        cache: vLLM's CacheConfig.
        model: vLLM's ModelConfig.

    Raises:
        EngineDead: Names the argument, its value, and the allowed values.
    """
    own = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in (allowed := ("auto", own, *_QUANTIZED)):
        raise EngineDead(
            f"engine_args.kv_cache_dtype: is {cache.cache_dtype!r}; Baton hands over caches of "
            f"{', '.join(allowed)}"
        )
    if layers := cache.kv_cache_dtype_skip_layers:
        raise EngineDead(
            f"engine_args.kv_cache_dtype_skip_layers: is {layers!r}; Baton hands over layers of "
            "one type only: leave it out"
        )


def refuse_states(cache: Any, model: Any, parallel: Any) -> None:
    """Refuses recurrent states that ranks do not keep like keys and values.

    Args:
        cache: vLLM's CacheConfig.
        model: vLLM's ModelConfig.
        parallel: vLLM's ParallelConfig.

    Raises:
        EngineDead: Names the argument, its value, and the allowed value.
    """
    if not model.has_inner_state:
        return
    if model.use_mla and (size := parallel.tensor_parallel_size) != 1:
        raise EngineDead(
            f"engine_args.tensor_parallel_size: is {size}; for {model.architecture} Baton supports "
            "1, because ranks hold equal latents and different recurrent states"
        )
    if getattr(cache, "use_replayssm", False):
        raise EngineDead(
            "engine_args.use_replayssm: is True; Baton hands over complete recurrent states: leave "
            "it out"
        )


def refuse_model(model: Any) -> None:
    """Refuses a model whose state is more than paged caches of tokens and recurrent states.

    Args:
        model: vLLM's ModelConfig.

    Raises:
        EngineDead: Names the model, its architecture, its kind of state, and what to do.
    """
    if (state := _foreign_state(model)) is not None:
        raise EngineDead(
            f"model: {model.model} ({model.architecture}) {state}; Baton hands over paged KV "
            "caches and recurrent states: serve it with plain vLLM"
        )


def _foreign_state(model: Any) -> str | None:
    """Returns the kind of unsupported state, as the end of "model: ..."; None if there is none."""
    if model.runner_type != "generate":
        return f"generates no tokens (its runner is {model.runner_type!r}) and keeps no KV cache"
    if model.is_encoder_decoder:
        return "is an encoder-decoder model: it keeps its encoder's output beside the KV cache"
    if "linear_attention" in _layer_types(model) and not model.has_inner_state:
        # Layers that vLLM runs through Transformers.
        return "has recurrent layers whose state vLLM does not keep in its cache"
    if model.is_diffusion:
        return "is a diffusion model: it rewrites tokens whose KV cache would be handed over"
    if hasattr(model.hf_text_config, "index_topk"):
        return "uses sparse attention: its indexer keeps a cache of its own"
    if (chunk := model.attention_chunk_size) is not None and not _has_full_attention(model):
        return f"uses chunked local attention: blocks of past chunks ({chunk} tokens) go"
    if model.has_noops:
        return "leaves attention out of some layers: they have no KV cache"
    return None


def _has_full_attention(model: Any) -> bool:
    """Returns whether some layers have full attention."""
    return "full_attention" in _layer_types(model)


def _layer_types(model: Any) -> Sequence[str]:
    """Returns the type of each layer; empty if the configuration does not name them."""
    return getattr(model.hf_text_config, "layer_types", None) or ()


def refuse_data_parallel(model: Any, size: int) -> None:
    """Refuses several data-parallel ranks, which Baton starts as workers of their own.

    Args:
        model: vLLM's ModelConfig.
        size: Number of data-parallel ranks.

    Raises:
        EngineDead: Names the argument, its value, and what to do.
    """
    if size == 1:
        return
    if not model.is_moe:
        raise EngineDead(
            f"engine_args.data_parallel_size: is {size}; Baton supports 1, because every worker "
            f"schedules its own requests: start {size} workers instead (baton up --workers {size})"
        )
    raise EngineDead(
        f"engine_args.data_parallel_size: is {size}; for {model.architecture} Baton supports 1, "
        "because data-parallel ranks that share experts compute every step together, and Baton "
        "starts and replaces each worker alone: divide the experts among the ranks of one worker "
        f"(tensor_parallel_size: {size}, enable_expert_parallel: true), or start {size} workers "
        f"that hold all experts (baton up --workers {size})"
    )


def refuse_stages(parallel: Any, speculation: Any) -> None:
    """Refuses drafts in an engine of several pipeline stages, with which nothing was compared.

    Args:
        parallel: vLLM's ParallelConfig.
        speculation: vLLM's SpeculativeConfig, or None.

    Raises:
        EngineDead: Names the argument, its value, and the allowed value.
    """
    if speculation is not None and (size := parallel.pipeline_parallel_size) != 1:
        raise EngineDead(
            f"engine_args.pipeline_parallel_size: is {size}; with speculative_config Baton "
            "supports 1, because no handoff of several stages with drafts was checked: leave one "
            "of the two out"
        )


def has_kv_draft(speculation: Any) -> bool:
    """Returns whether speculative decoding has a draft with a KV cache that Baton hands over.

    Args:
        speculation: vLLM's SpeculativeConfig, or None.
    """
    return speculation is not None and speculation.method in _KV_DRAFTS


def refuse_speculation(config: Any) -> None:
    """Refuses speculative decoding whose draft's KV cache Baton cannot hand over.

    Args:
        config: vLLM's VllmConfig.

    Raises:
        EngineDead: Names the setting, its value, the reason and what to do.
    """
    speculation = config.speculative_config
    if speculation is None or speculation.method in _CACHELESS_DRAFTS:
        return
    if (refused := _foreign_draft(config, speculation)) is not None:
        raise EngineDead(f"engine_args.speculative_config: {refused}")


def _foreign_draft(config: Any, speculation: Any) -> str | None:
    """Returns why a draft is refused, as the end of "...speculative_config: "; or None."""
    model, draft = config.model_config, speculation.draft_model_config
    if speculation.method not in _KV_DRAFTS:
        allowed = ", ".join(sorted(_CACHELESS_DRAFTS | _KV_DRAFTS))
        return (
            f"method is {speculation.method!r}, whose draft keeps a KV cache of a kind that Baton "
            f"does not hand over: use one of {allowed}, or serve the model with plain vLLM"
        )
    method = f"method is {speculation.method!r}"
    if (num_tokens := config.num_prefill_lookahead_tokens) > 1:
        return (
            f"num_speculative_tokens is {num_tokens}, by several MTP modules, of which each one "
            "reads a token further ahead: set 1, which uses one module"
        )
    if speculation.parallel_drafting:
        return "parallel_drafting is True; Baton hands over drafts that draft one token at a time"
    if speculation.use_eagle_block_drop():
        return (
            "disable_eagle_block_drop is False; must be True, Baton's default, because handoffs "
            "leave out every block that the decode worker has cached"
        )
    if model.has_inner_state or model.get_sliding_window():
        kept = "recurrent states" if model.has_inner_state else "layers with sliding windows"
        return (
            f"{method}, and {model.architecture} has {kept}; Baton hands over drafts of models "
            "whose layers all keep every token: leave it out, or use ngram"
        )
    if speculation.kv_cache_dtype not in (None, config.cache_config.cache_dtype):
        return (
            f"kv_cache_dtype is {speculation.kv_cache_dtype!r}; must be that of the model, "
            f"{config.cache_config.cache_dtype!r}"
        )
    tp_size = config.parallel_config.tensor_parallel_size
    if speculation.draft_tensor_parallel_size not in (None, tp_size):
        return (
            f"draft_tensor_parallel_size is {speculation.draft_tensor_parallel_size}; must be that "
            f"of the model, {tp_size}"
        )
    if draft.use_mla != model.use_mla:
        names = f"{draft.architecture} and {model.architecture}"
        return f"{method}; only one of {names} has latent attention, and their ranks differ"
    return None
