"""Files of the demo model except its weights: tokenizer, chat template and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from baton.models.corpus import Corpus

DIRECTORY = Path(__file__).parent / "glossary"
BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
MAX_MODEL_LEN = 4096
# Only the last question, or the last result of a tool, is read, and an answer to it that has begun;
# earlier messages are ignored.
CHAT_TEMPLATE = (
    "{{ bos_token }}<|user|>"
    "{{ (messages | selectattr('role', 'in', ['user', 'tool']) | list)[-1].content }}"
    "{% if add_generation_prompt %}<|assistant|>{% elif messages[-1].role == 'assistant' %}"
    "<|assistant|>{{ messages[-1].content }}{{ eos_token }}{% endif %}"
)
# head_dim is one that every attention backend of vLLM supports, including the CPU's.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def make_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE tokenizer: every text has tokens and is restored from them unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[AddedToken(token, special=True) for token in (BOS, EOS, USER, ASSISTANT)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = list(corpus.texts())
    tokenizer.train_from_iterator([*texts, *(text.lower() for text in texts)], trainer)
    return tokenizer


def write_files(directory: Path, tokenizer: Tokenizer) -> None:
    """Writes all files except the weights."""
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "config.json", CONFIG)
    write_json(directory / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_MODEL_LEN,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
