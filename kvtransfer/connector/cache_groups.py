"""Describes vLLM's KV cache groups as Baton's groups of layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from baton.runtime.kv.kv_groups import Kind, KvGroup

# Subclasses of these types are refused: they keep more than the tokens' keys and values, or keep
# other tokens.
_KINDS: Mapping[type, Kind] = {
    FullAttentionSpec: "full",
    MLAAttentionSpec: "full",
    SlidingWindowSpec: "window",
    MambaSpec: "state",
}


class UnsupportedCache(ValueError):
    """Baton cannot hand over one of the model's caches; the message names its type."""


def named_groups(config: KVCacheConfig, draft: Collection[str] = ()) -> dict[KvGroup, list[str]]:
    """Returns the groups of layers in their order, each with vLLM's names of its layers.

    The groups of a draft come last.

    The scheduler's configuration has one specification per block table, even where layers of a
    table differ; only tables, kinds and block sizes are right in what it gives.

    Args:
        config: vLLM's description of its caches.
        draft: Names of a draft's layers.

    Raises:
        UnsupportedCache: Baton does not hand over caches of this type.
    """
    found: dict[tuple[Any, ...], list[str]] = {}
    for table, group in enumerate(config.kv_cache_groups):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            key = (name in draft, table, *_described(spec))
            found.setdefault(key, []).append(name)
    named = {}
    for (is_draft, table, kind, *sizes, window), names in sorted(
        found.items(), key=lambda one: one[0][0]
    ):
        num_heads, block_size, block_bytes = sizes
        group_of_layers = KvGroup(
            kind, len(names), num_heads, block_size, block_bytes, window, table, is_draft
        )
        named[group_of_layers] = names
    return named


def _described(spec: KVCacheSpec) -> tuple[Kind, int, int, int, int]:
    """Returns kind, heads, tokens and bytes of a block, and window of a layer's cache.

    A cache that compresses several tokens into one state (DeepSeek V4) is refused, because its
    blocks would look like blocks that kernels cut into parts.
    """
    kind = _KINDS.get(type(spec))
    if kind is None or (kind != "state" and spec.tokens_per_state != 1):
        raise UnsupportedCache(type(spec).__name__)
    if isinstance(spec, MambaSpec) and spec.num_speculative_blocks:
        raise UnsupportedCache("MambaSpec with drafts")
    # A full specification may have a window too, if vLLM keeps every token nevertheless.
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    return kind, spec.num_heads, spec.block_size, spec.real_page_size_bytes, window
