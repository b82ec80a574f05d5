"""Reports where vLLM's CUDA backends put a token's keys and values in its cache."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from baton.engine.vllm_config import KEYS_THEN_VALUES, LATENT_THEN_ROPE, content_of

BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 2, 4, 8


def main() -> dict[str, Any]:
    said = {name: _stores(name) for name in KEYS_THEN_VALUES | LATENT_THEN_ROPE}
    return {
        "stored": {name: each for name, each in said.items() if each is not None},
        "named": [
            content_of(["FLASH_ATTN"]),
            content_of(["FLASHINFER"]),
            content_of(["FLASHINFER", "TRITON_ATTN"]),
            content_of(["FLASHMLA"]),
            content_of(["CUTLASS_MLA"]),
            content_of(["FLASH_ATTN", "B12X"]),
            content_of(["FLASHMLA", "FLASH_ATTN"]),
        ],
    }


def _stores(name: str) -> str | None:
    """Returns the arrangement that a backend writes; None if its module needs a GPU."""
    try:
        backend = AttentionBackendEnum[name].get_class()
    except (ImportError, AssertionError):
        return None
    impl = backend.get_impl_cls()
    if name in LATENT_THEN_ROPE:
        is_common = impl.do_kv_cache_update is MLAAttentionImpl.do_kv_cache_update
        return "latent,rope" if is_common else "other"
    return _halves(impl)


def _halves(impl: Any) -> str:
    """Runs the method that writes a cache, with its kernel replaced by one that records views."""
    layer = object.__new__(impl)
    layer.__dict__.update(
        attn_type=AttentionType.DECODER,
        head_size=HEAD_SIZE,
        kv_cache_dtype="auto",
        kv_sharing_target_layer_name=None,
        _is_per_token_head_quant=False,
    )
    views: list[torch.Tensor] = []

    def record(_key: Any, _value: Any, keys: torch.Tensor, values: torch.Tensor, *_: Any) -> None:
        views.extend((keys, values))

    cache = torch.arange(BLOCKS * HEADS * TOKENS * 2 * HEAD_SIZE).view(
        BLOCKS, HEADS, TOKENS, 2 * HEAD_SIZE
    )
    scales = SimpleNamespace(_k_scale=None, _v_scale=None)
    module = importlib.import_module(impl.__module__)
    kernels = SimpleNamespace(reshape_and_cache_flash=record)
    with (
        mock.patch.object(module, "reshape_and_cache_flash", record, create=True),
        mock.patch.object(module, "triton_reshape_and_cache_flash", record, create=True),
        mock.patch.object(torch.ops, "_C_cache_ops", kernels, create=True),
    ):
        layer.do_kv_cache_update(scales, None, None, cache, None)
    keys, values = views
    halves = cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    is_in_halves = torch.equal(keys, halves[0]) and torch.equal(values, halves[1])
    return "keys,values" if is_in_halves else "other"
