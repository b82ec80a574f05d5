"""Reports which of vLLM's cache specs the connector accepts as caches that keep every token."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from baton.kvtransfer.connector.vllm_connector import _keeps_every_token


def main() -> dict[str, bool]:
    sizes = {"block_size": 64, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    latent = MLAAttentionSpec(**sizes)
    specs = {
        "full": FullAttentionSpec(**sizes, sliding_window=16),
        "latent": latent,
        "window": SlidingWindowSpec(**sizes, sliding_window=16),
        "several tokens in one state": replace(latent, tokens_per_state=4),
    }
    return {name: bool(_keeps_every_token(spec)) for name, spec in specs.items()}
