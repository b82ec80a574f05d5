"""Small random models with drafts that are often right: they are made of the model's weights.

The model's first layer decides most of its answers. A draft is a copy of this layer. It computes
from token i + 1 what the layer computes there, so it needs its own KV cache of all tokens before.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from baton.runtime import demo_model

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
# Share of the draft's input that comes from the model's output, and not from the token.
_FROM_MODEL = 0.1
# The weights of the model's second layer, which no draft has, are multiplied by this.
_SECOND_LAYER = 0.2


def make_llama(directory: Path) -> str:
    """Writes a Llama; returns its directory."""
    return _write(transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, head_dim=32), directory)


def make_latent(directory: Path) -> str:
    """Writes a DeepSeek V3 with one MTP module; returns its directory."""
    # vLLM's CPU kernels for latents support only one size.
    config = transformers.DeepseekV3Config(
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
        first_k_dense_replace=3,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
    )
    made = _write(config, directory)
    weights = load_file(directory / "model.safetensors")
    module = "model.layers.2."
    weights |= {
        f"{module}{name}": layer.clone() for name, layer in _first_layer(weights).items()
    } | {
        f"{module}enorm.weight": torch.ones(64),
        f"{module}hnorm.weight": torch.ones(64),
        f"{module}eh_proj.weight": _mixed(),
        f"{module}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{module}shared_head.norm.weight": torch.ones(64),
        f"{module}shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file(weights, directory / "model.safetensors")
    _set_config(directory, num_nextn_predict_layers=1)
    return made


def make_eagle(model: str, directory: Path) -> str:
    """Writes an EAGLE draft of a Llama; returns its directory."""
    weights = load_file(Path(model) / "model.safetensors")
    # Such a draft has no norm before its layer.
    layer = {
        f"layers.0.{name}": one
        for name, one in _first_layer(weights).items()
        if name != "input_layernorm.weight"
    }
    return _write_draft(model, {"fc.weight": _mixed(), **layer}, directory)


def make_eagle3(model: str, directory: Path) -> str:
    """Writes an EAGLE-3 draft of a Llama, which is seldom right; returns its directory."""
    weights = load_file(Path(model) / "model.safetensors")
    layer = _first_layer(weights)
    for name in ("q", "k", "v"):
        # Its inputs are the token and the model's output.
        of_token = layer[f"self_attn.{name}_proj.weight"]
        layer[f"self_attn.{name}_proj.weight"] = torch.cat([of_token, 0.1 * of_token], dim=1)
    made = {f"midlayer.{name}": one for name, one in layer.items()}
    made["midlayer.hidden_norm.weight"] = torch.ones(64)
    made |= {"fc.weight": torch.eye(64), "norm.weight": torch.ones(64)}
    made["lm_head.weight"] = weights["lm_head.weight"]
    draft = _write_draft(model, made, directory)
    eagle_config = {"eagle_aux_hidden_state_layer_ids": [1], "use_aux_hidden_state": True}
    _set_config(
        directory,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=_SIZES["vocab_size"],
        eagle_config=eagle_config,
    )
    return draft


def _first_layer(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    first = "model.layers.0."
    return {name.removeprefix(first): one for name, one in weights.items() if first in name}


def _mixed() -> torch.Tensor:
    return torch.cat([torch.eye(64), _FROM_MODEL * torch.eye(64)], dim=1)


def _write(config: Any, directory: Path) -> str:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                wide = torch.randn(weights.shape, generator=generator)
                weights.copy_(wide * 1.5 / weights.shape[-1] ** 0.5)
            if ".layers.1." in name and ("o_proj" in name or "down_proj" in name):
                weights.mul_(_SECOND_LAYER)
        # A norm does not change these, so that a draft without one computes the same.
        embeddings = model.get_input_embeddings().weight
        embeddings.div_(embeddings.pow(2).mean(dim=-1, keepdim=True).sqrt())
    model.save_pretrained(directory)
    tokenizer = Path(demo_model.ensure("demo-2-layers", weights=False))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, directory)
    return str(directory)


def _write_draft(model: str, weights: dict[str, torch.Tensor], directory: Path) -> str:
    directory.mkdir()
    shutil.copy(Path(model) / "config.json", directory)
    save_file(
        {name: one.contiguous() for name, one in weights.items()}, directory / "model.safetensors"
    )
    _set_config(directory, num_hidden_layers=1)
    return str(directory)


def _set_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
