"""Two engines of a small random model that is not a Llama, and the answers of one alone.

Without prefix caching, one engine hands over to itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend

from baton.engine import vllm_config
from baton.engine.base import EngineRequest
from baton.runtime import demo_model
from baton.runtime.process import affinity
from baton.v1 import common_pb2
from tests.vllm import vllm_cases as cases
from tests.vllm.engine_handoffs import Side, handed_over, left_behind, side
from tests.vllm.engine_recoveries import recovered
from tests.vllm.forked_engines import fork_engines

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def _windowed() -> Any:
    return transformers.Gemma3TextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def _gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **_SIZES | {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 128},
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def _all_windowed() -> Any:
    return transformers.MistralConfig(
        **_SIZES, num_key_value_heads=2, head_dim=32, sliding_window=64
    )


def _two_sizes() -> Any:
    """Returns a model whose layers with full attention have larger heads."""
    return transformers.Gemma4TextConfig(
        **_SIZES,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=512,
        num_kv_shared_layers=0,
    )


def _recurrent(num_layers: int = 4) -> Any:
    """Returns a model with gated delta nets, beside full attention in every fourth layer."""
    return transformers.Qwen3NextConfig(
        **_SIZES | {"num_hidden_layers": num_layers, "hidden_size": 128},
        num_key_value_heads=2,
        head_dim=32,
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    )


_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}


def _nemotron() -> Any:
    """Returns a hybrid with a layer that has neither attention nor a state."""
    return transformers.NemotronHConfig(
        **_SIZES | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        hybrid_override_pattern="M*M-",
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        conv_kernel=4,
        chunk_size=64,
    )


def _granite() -> Any:
    return transformers.GraniteMoeHybridConfig(
        **_SIZES | {"hidden_size": 128},
        **_MAMBA | {"mamba_d_head": 32},
        num_key_value_heads=2,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        position_embedding_type="nope",
    )


def _falcon() -> Any:
    """Returns a hybrid whose layers have attention and a state."""
    return transformers.FalconH1Config(
        **_SIZES, **_MAMBA, num_key_value_heads=2, head_dim=32, mamba_d_ssm=128
    )


def _mamba() -> Any:
    return transformers.Mamba2Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _narrow() -> Any:
    """Returns a model whose KV cache has eight bits."""
    return transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, head_dim=32)


def _latent() -> Any:
    # vLLM's CPU kernels for latents support only one size.
    return transformers.DeepseekV3Config(
        **_SIZES,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
    )


ENGINE_ARGS: dict[str, Any] = {
    "kv_cache_memory_bytes": 2**23,
}
if not cases.NUM_GPUS:
    # On CPUs vLLM's rotation treats the rotated part of a query as all of it: without scaled
    # positions, latent attention is wrong for prompts of several tokens.
    ENGINE_ARGS["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
CONFIGS = {
    "windowed": _windowed,
    "gpt-oss": _gpt_oss,
    "all windowed": _all_windowed,
    "two sizes": _two_sizes,
    "recurrent": _recurrent,
    "recurrent, 8 layers": partial(_recurrent, 8),
    "nemotron": _nemotron,
    "granite": _granite,
    "falcon": _falcon,
    "mamba": _mamba,
    "latent": _latent,
    "fp8": _narrow,
}
OWN_ARGS: dict[str, dict[str, Any]] = {
    "fp8": {"kv_cache_dtype": "fp8"},
    # vLLM's CPU kernels for gated delta nets support only this type.
    "recurrent": {"dtype": "bfloat16"},
    "recurrent, 8 layers": {"dtype": "bfloat16"},
    "mamba": {"enable_prefix_caching": False},
}
if cases.NUM_GPUS:
    # vLLM's GPU kernels for latents take no float32.
    OWN_ARGS["latent"] = {"dtype": "bfloat16"}
else:
    # vLLM's CPU kernels for Mamba2 keep no states for the prefix cache.
    OWN_ARGS |= {
        name: {"enable_prefix_caching": False} for name in ("nemotron", "granite", "falcon")
    }


def make(name: str, directory: Path) -> str:
    """Writes the model's checkpoint, with the demo models' tokenizer."""
    torch.manual_seed(3)
    config = CONFIGS[name]()
    if isinstance(config, transformers.Mamba2Config):
        # Transformers names no class for it.
        model = transformers.Mamba2ForCausalLM(config).to(torch.float32)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                # The range is wider than a trained model's initial one, so that tokens vary.
                wide = torch.randn(weights.shape, generator=generator)
                weights.copy_(wide * 1.5 / weights.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    tokenizer = Path(demo_model.ensure("demo-2-layers", weights=False))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory)
    return str(directory)


async def answered_alone(one: Side, case: cases.Case) -> list[int]:
    """Returns the answers of an engine without handoffs."""
    sampling = common_pb2.SamplingParams(**case["sampling"])
    request = EngineRequest(f"{case['name']}-alone", case["prompt"], sampling)
    return (await one.finish(request))[0]


async def answered_beside_drops(one: Side, case: cases.Case) -> list[int]:
    """Returns the answer of an engine whose whole cache is deleted with each of its tokens."""
    sampling = common_pb2.SamplingParams(**case["sampling"])
    outputs = one.outputs(f"{case['name']}-dropped")
    await one.engine.submit(EngineRequest(f"{case['name']}-dropped", case["prompt"], sampling))
    tokens: list[int] = []
    async with asyncio.TaskGroup() as group:
        while len(tokens) < sampling.max_tokens:
            tokens += (await outputs.get()).token_ids
            group.create_task(one.engine.drop_cache(None))
    return tokens


def announced_block_size(model: str) -> int:
    """Returns the fingerprint's block size for attention with 64 tokens only, like FlashMLA."""
    config = vllm_config.RefusingEngineArgs(model=model).create_engine_config()
    config.cache_config.user_specified_block_size = False
    with (
        mock.patch.object(vllm_config, "get_attn_backend", return_value=FlashMLABackend),
        mock.patch.object(vllm_config, "current_platform", wraps=current_platform) as platform,
    ):
        platform.is_cpu.return_value = False
        layout = vllm_config.layout_of(config, "m")
    # Ranks do not change a block size that is set.
    assert config.cache_config.user_specified_block_size
    assert config.cache_config.block_size == layout.block_size_tokens
    return layout.block_size_tokens


async def run(name: str, ranks: list[int], given: dict[str, Any]) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-")))
        model = make(name, directory / "model")
        sides = []
        engine_args = {**ENGINE_ARGS, **OWN_ARGS.get(name, {})}
        for num_ranks, socket in zip(ranks, ("p.sock", "d.sock"), strict=False):
            # The cores of one engine's ranks must not bind another engine's.
            os.environ.pop(affinity.VLLM_BIND_THREADS, None)
            begun = side(
                model,
                num_ranks,
                str(directory / socket),
                # In bfloat16, answers depend on the chunks of a prompt, which Baton's scheduler
                # chooses by the time that steps take.
                scheduler="vllm" if "dtype" in OWN_ARGS.get(name, {}) else "baton",
                **engine_args,
            )
            sides.append(await stack.enter_async_context(begun))
        prefill, decode = sides[0], sides[-1]
        made = await handed_over(prefill, decode, given)
        made["recovered"] = [await recovered(prefill, decode, case) for case in given["lost"]]
        alone = {
            case["name"]: await answered_alone(prefill, case)
            for case in given["one_by_one"] + given["together"] + given["lost"] + given["dropped"]
        }
        made["dropped"] = {
            case["name"]: await answered_beside_drops(prefill, case) for case in given["dropped"]
        }
        made["left"] += await left_behind(prefill, decode)
        layout = prefill.info.layout
        sizes = {
            "num_ranks": [each.info.layout.tp_size for each in sides],
            "num_shards": layout.num_shards,
            "block_bytes": layout.block_bytes,
            "block_size": layout.block_size_tokens,
            "has_states": layout.has_states,
        }
        fixed = announced_block_size(model) if name == "latent" else None
    return {**made, **sizes, "alone": alone, "announced_block_size": fixed}


def main(name: str, ranks: list[int], given: dict[str, Any]) -> dict[str, Any]:
    fork_engines()
    return asyncio.run(run(name, ranks, given))
