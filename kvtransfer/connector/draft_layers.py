"""Finds the layers of a speculative draft with a KV cache of its own (EAGLE, MTP, a draft model).

vLLM puts them into the block tables of the model's layers and gives them no mark. Entry i of an
EAGLE or MTP draft comes from the model's output at token i and from token i + 1, so the entry of a
prompt's last token needs the first token of the answer. vLLM runs the draft when it has sampled,
within the same step, and tells the connector of the step's end after that. So all entries of a
handoff are complete when its last step ends (RankHandoffs.end_step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton.kvtransfer.layout import KvLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# vLLM's prefix of the layers of a draft that is a language model (method "draft_model").
_DRAFT_MODEL = "draft_model."


def draft_layers(config: VllmConfig, caches: KVCacheConfig) -> frozenset[str]:
    """Returns vLLM's names of a draft's layers; empty without a draft that has a KV cache.

    EAGLE and MTP number their layers after the model's.
    """
    if config.speculative_config is None or not config.speculative_config.uses_draft_kv_cache():
        return frozenset()
    num_layers = config.model_config.get_total_num_hidden_layers()
    names = (name for group in caches.kv_cache_groups for name in group.layer_names)
    return frozenset(
        name for name in names if name.startswith(_DRAFT_MODEL) or _index(name) >= num_layers
    )


def _index(name: str) -> int:
    """Returns the first number in a layer's name; -1 if it has none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def check_draft(layout: KvLayout) -> None:
    """Raises ValueError for a draft whose layers cannot be handed over beside the model's.

    Args:
        layout: Layout of the started engine.
    """
    if not layout.draft_groups and not layout.draft_revision:
        return
    if not layout.draft_groups:
        raise ValueError(
            f"speculative_config: no layer of draft {layout.draft_revision} is in the KV cache, "
            "which Baton hands over: use another method, or serve the model with plain vLLM"
        )
    if not layout.keeps_every_token:
        raise ValueError(
            f"speculative_config: draft {layout.draft_revision} has layers of another kind than "
            "the model, or the model has windows or states: Baton hands over drafts of models "
            "whose layers all keep every token"
        )
