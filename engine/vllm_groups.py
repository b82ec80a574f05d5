"""Derives a model's groups of layers from its configuration, before weights are loaded.

For estimates only: the engine reports the groups that vLLM has made (kvtransfer/engine_groups.py).
vLLM may cut these groups into several block tables, and enlarge the blocks of small layers.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv_groups import Kind, KvGroup


def expected_layout(config: Any, layout: KvLayout) -> KvLayout:
    """Returns a layout with the groups to expect.

    Args:
        config: vLLM's VllmConfig.
        layout: Layout of the model as if all layers kept every token, in equal blocks.
    """
    model = config.model_config
    block_bytes_per_value = layout.block_bytes // (layout.num_kv_heads * layout.head_size)
    found: Counter[tuple[Kind, int, int]] = Counter()
    num_own = layout.num_layers - getattr(model.hf_text_config, "num_kv_shared_layers", 0)
    for index in range(num_own):
        of_layer = model.model_arch_config[index]
        heads = model.get_num_kv_heads(config.parallel_config, of_layer)
        block_bytes = heads * of_layer.head_size * block_bytes_per_value
        found[_kind(model, index), heads, block_bytes] += 1
    window = model.get_sliding_window() or 0
    return layout.with_groups(
        [
            KvGroup(
                kind,
                num_layers,
                heads,
                layout.block_size_tokens,
                block_bytes,
                window if kind == "window" else 0,
                table,
            )
            for table, ((kind, heads, block_bytes), num_layers) in enumerate(found.items())
        ]
    )


def _kind(model: Any, index: int) -> Kind:
    if not model.get_sliding_window():
        return "full"
    types = getattr(model.hf_text_config, "layer_types", None)
    return "window" if not types or types[index] == "sliding_attention" else "full"
