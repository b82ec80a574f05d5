"""What vLLM serves and Baton cannot hand over, refused by name before any weights are loaded.

Baton hands over the blocks of one paged cache of full attention, rank by rank, on one host. vLLM
does not refuse the rest: of a sliding-window model, say, it turns its hybrid cache manager off
beside a connector and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.engine.base import EngineDead

_EVERY_TOKEN = "each rank must hold every token of what it hands over"
# Engine arguments that must be left at 1, and why.
_ONE_ONLY = {
    "pipeline_parallel_size": "each rank must hold every layer of what it hands over",
    "prefill_context_parallel_size": _EVERY_TOKEN,
    "decode_context_parallel_size": _EVERY_TOKEN,
    "nnodes": "every rank must be on its worker's host",
}
# Drafts that keep no KV cache beside the model's own.
_CACHELESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"})


def refuse_settings(engine_args: Mapping[str, Any]) -> None:
    """Refuses what spreads the cache over more than Baton hands over, or schedules otherwise.

    Raises:
        EngineDead: naming the argument, its value, and what to do.
    """
    for name, why in _ONE_ONLY.items():
        if (size := engine_args.get(name, 1)) != 1:
            raise EngineDead(
                f"engine_args.{name}: is {size}; Baton supports 1, because {why}: leave it out, "
                "or serve the model with plain vLLM"
            )
    if (scheduler := engine_args.get("scheduler_cls")) is not None:
        raise EngineDead(
            f"engine_args.scheduler_cls: is {scheduler!r}; Baton supports vLLM's own, because "
            "handoffs are loaded and sent by what it does in each step: leave it out"
        )


def refuse_model(model: Any) -> None:
    """Refuses a model whose state is more than one paged cache of full attention.

    Args:
        model: vLLM's ModelConfig.

    Raises:
        EngineDead: naming the model, its architecture, what its state is, and what to do.
    """
    state, remedy = _foreign_state(model), "serve it with plain vLLM"
    if state is None:
        return
    if model.get_sliding_window() is not None and model.runner_type == "generate":
        remedy += ", or cut its context to the window with engine_args.disable_sliding_window"
    raise EngineDead(
        f"model: {model.model} ({model.architecture}) {state}; Baton hands over the paged KV cache "
        f"of full attention only: {remedy}"
    )


def _foreign_state(model: Any) -> str | None:
    """In words, continuing "model: ..."; None when the model has no other state."""
    if model.runner_type != "generate":
        return f"generates no tokens (its runner is {model.runner_type!r}) and keeps no KV cache"
    if model.is_encoder_decoder:
        return "is an encoder-decoder model: it keeps its encoder's output beside the KV cache"
    if model.is_attention_free:
        return "has no attention: its state is recurrent, and there is no KV cache"
    if model.is_hybrid or model.has_inner_state:
        return "is a hybrid model: it mixes attention with layers whose state is recurrent"
    if model.is_diffusion:
        return "is a diffusion model: it rewrites tokens whose KV cache would be handed over"
    if model.use_mla:
        return (
            "uses multi-head latent attention (MLA): its cache holds latents, not keys and values"
        )
    if (window := model.get_sliding_window()) is not None:
        return f"uses sliding-window attention: blocks more than {window} tokens back go"
    if (chunk := model.attention_chunk_size) is not None:
        return f"uses chunked local attention: blocks of past chunks ({chunk} tokens) go"
    if model.has_noops:
        return "leaves attention out of some layers: they have no KV cache"
    return None


def refuse_speculation(config: Any) -> None:
    """Raises EngineDead: speculative decoding whose draft has a cache of its own.

    Args:
        config: vLLM's SpeculativeConfig, or None.
    """
    if config is not None and config.method not in _CACHELESS_DRAFTS:
        raise EngineDead(
            f"engine_args.speculative_config: method is {config.method!r}, whose draft keeps a KV "
            "cache of its own; Baton hands over the model's cache only: use one of "
            f"{', '.join(sorted(_CACHELESS_DRAFTS))}, or serve the model with plain vLLM"
        )
