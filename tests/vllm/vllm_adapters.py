"""LoRA adapters with random weights, which every worker of the session's cluster loads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

RANK = 4
NAMES = ("clerk", "poet")


def make_adapter(directory: Path, model: str, seed: int) -> str:
    """Writes a random LoRA in peft's form, strong enough to change the tokens."""
    shape = json.loads((Path(model) / "config.json").read_text())
    hidden, head = shape["hidden_size"], shape["head_dim"]
    sizes = {
        "q_proj": shape["num_attention_heads"] * head,
        "k_proj": shape["num_key_value_heads"] * head,
        "v_proj": shape["num_key_value_heads"] * head,
    }
    source = np.random.default_rng(seed)
    weights = dict[str, np.ndarray]()

    def random(*sizes: int) -> np.ndarray:
        return source.standard_normal(sizes, np.float32)

    for layer in range(shape["num_hidden_layers"]):
        for name, size in sizes.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = random(RANK, hidden)
            weights[f"{where}.lora_B.weight"] = random(size, RANK) / 4
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": list(sizes), "task_type": "CAUSAL_LM"}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, directory / "adapter_model.safetensors")
    return str(directory)
