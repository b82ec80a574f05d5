"""Reports how the connector describes vLLM's cache specs, and which it refuses."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from baton.kvtransfer.connector.cache_groups import UnsupportedCache, named_groups


def described(*specs: KVCacheSpec) -> list[list[object]] | str:
    """Returns the groups of a model with two layers per block table; or the refused type."""
    tables = [
        KVCacheGroupSpec([f"{table}.0", f"{table}.1"], spec) for table, spec in enumerate(specs)
    ]
    try:
        groups = named_groups(KVCacheConfig(8, [], tables))
    except UnsupportedCache as error:
        return str(error)
    return [
        [group.kind, group.num_layers, group.block_bytes, group.window_tokens, group.table]
        for group in groups
    ]


def main() -> dict[str, list[list[object]] | str]:
    sizes = {"block_size": 64, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    full, latent = FullAttentionSpec(**sizes), MLAAttentionSpec(**sizes)
    window = SlidingWindowSpec(**sizes, sliding_window=16)
    state = MambaSpec(block_size=64, shapes=((3, 5), (7,)), dtypes=(torch.bfloat16, torch.float32))
    return {
        "full": described(full),
        "full with a window": described(replace(full, sliding_window=16)),
        "latent": described(latent),
        "window": described(window),
        "state": described(state),
        "state with drafts": described(replace(state, num_speculative_blocks=1)),
        "window and full": described(window, full),
        "two sizes in one table": described(
            UniformTypeKVCacheSpecs(64, kv_cache_specs={"0.0": full, "0.1": latent})
        ),
        "several tokens in one state": described(replace(latent, tokens_per_state=4)),
        "chunks": described(ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=16)),
    }
