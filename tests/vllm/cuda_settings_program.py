"""Reports what Baton knows of vLLM on CUDA GPUs, beside what vLLM's code says."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import CacheConfig
from vllm.v1.attention.backend import AttentionType, MLAAttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from baton.engine.base import EngineDead
from baton.engine.vllm_config import KEYS_THEN_VALUES, LATENT_THEN_ROPE, content_of, leave_room
from baton.engine.vllm_refusals import refuse_executor
from baton.kvtransfer.connector.handoffs.cuda_device_copies import scratch_bytes

GPU_BYTES = 80 * 2**30
BLOCKS, HEADS, TOKENS, HEAD_SIZE = 3, 2, 4, 8


def main() -> dict[str, Any]:
    said = {name: _stores(name) for name in KEYS_THEN_VALUES | LATENT_THEN_ROPE}
    return {
        "refused": _refused(uses_ray=True),
        "not_refused": _refused(uses_ray=False),
        "left": _left_bytes(64 * 2**10),
        "left_by_large_blocks": _left_bytes(12 * 2**20),
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


def _refused(*, uses_ray: bool) -> str:
    """Returns the refusal of an executor that vLLM has chosen itself."""
    try:
        refuse_executor(SimpleNamespace(use_ray=uses_ray))
    except EngineDead as error:
        return str(error)
    return ""


def _left_bytes(block_bytes: int) -> int:
    """Returns by how many bytes vLLM's share of a GPU shrinks for Baton's scratch."""
    cache = CacheConfig(gpu_memory_utilization=0.92)
    leave_room(cache, scratch_bytes(block_bytes), GPU_BYTES)
    return round((0.92 - cache.gpu_memory_utilization) * GPU_BYTES)


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
