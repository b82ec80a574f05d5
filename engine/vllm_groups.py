"""Derives a model's groups of layers from its configuration, before weights are loaded.

For estimates only: the engine reports the groups that vLLM has made (kvtransfer/engine_groups.py).
vLLM may cut these groups into several block tables, and enlarge the blocks of small layers.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm.model_executor.models import ModelRegistry
from vllm.v1.kv_cache_interface import MambaSpec

from baton.engine.vllm_refusals import has_kv_draft
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup

# vLLM's names of layers with a recurrent state.
_RECURRENT = ("mamba", "linear_attention")


def all_stages(parallel: Any) -> Any:
    """Returns vLLM's ParallelConfig as if one pipeline stage held all layers, to count them."""
    made = copy.copy(parallel)
    made.pipeline_parallel_size = 1
    return made


def expected_layout(config: Any, layout: KvLayout) -> KvLayout:
    """Returns a layout with the groups to expect.

    Args:
        config: vLLM's VllmConfig.
        layout: Layout of the model as if all layers kept every token, in equal blocks.
    """
    found = Counter(_attention_layers(config, layout))
    groups = [replace(one, num_layers=number) for one, number in found.items()]
    if config.model_config.has_inner_state:
        groups += _states(config, layout)
    groups = [replace(one, table=at) for at, one in enumerate(groups)]
    return layout.with_groups(groups + _draft(config, layout))


def _draft(config: Any, layout: KvLayout) -> list[KvGroup]:
    """Returns the group of a draft's layers; none without a draft that has a KV cache."""
    if not has_kv_draft(speculation := config.speculative_config):
        return []
    draft = speculation.draft_model_config
    # An MTP module has one layer, and its configuration is the model's own.
    modules = getattr(draft.hf_config, "num_nextn_predict_layers", 1)
    is_mtp = speculation.method == "mtp"
    num_layers = modules if is_mtp else draft.get_num_layers(config.parallel_config)
    heads = draft.get_num_kv_heads(config.parallel_config)
    one_head = layout.block_bytes // (layout.num_kv_heads * layout.head_size)
    block_bytes = heads * draft.get_head_size() * one_head
    block_size = layout.block_size_tokens
    return [KvGroup("full", num_layers, heads, block_size, block_bytes, is_draft=True)]


def _attention_layers(config: Any, layout: KvLayout) -> Iterator[KvGroup]:
    """Yields a group of one layer for each attention layer."""
    model = config.model_config
    num_own = layout.num_layers - getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    if model.has_inner_state:
        num_own = _num_layers(config, "attention")
    window = model.get_sliding_window()
    types = getattr(model.hf_text_config, "layer_types", None)
    for index in range(num_own):
        of_layer = model.model_arch_config[index]
        heads = model.get_num_kv_heads(config.parallel_config, of_layer)
        one_head = layout.block_bytes // (layout.num_kv_heads * layout.head_size)
        block_bytes = heads * of_layer.head_size * one_head
        is_windowed = window and (not types or types[index] == "sliding_attention")
        yield KvGroup(
            "window" if is_windowed else "full",
            1,
            heads,
            layout.block_size_tokens,
            block_bytes,
            window if is_windowed else 0,
        )


def _states(config: Any, layout: KvLayout) -> list[KvGroup]:
    """Returns the group of recurrent layers; none for classes that describe them otherwise."""
    model = config.model_config
    model_class, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    if not hasattr(model_class, "get_mamba_state_shape_from_config"):
        return []
    spec = MambaSpec(
        block_size=model.max_model_len,
        shapes=model_class.get_mamba_state_shape_from_config(config),
        dtypes=model_class.get_mamba_state_dtype_from_config(config),
    )
    num_layers = sum(_num_layers(config, kind) for kind in _RECURRENT)
    # Some hybrids have a state in every layer.
    num_layers = num_layers or layout.num_layers
    return [KvGroup("state", num_layers, 0, spec.block_size, spec.real_page_size_bytes)]


def _num_layers(config: Any, kind: str) -> int:
    model, parallel = config.model_config, all_stages(config.parallel_config)
    try:
        return int(model.get_num_layers_by_block_type(parallel, kind))
    except ValueError:
        # The configuration does not name the layers' types: each layer has attention and a state.
        return int(model.get_num_layers(parallel)) if kind == "attention" else 0
