"""A small random model whose chats may have images, and images for it."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image

from baton.runtime import demo_model

IMAGE_TOKEN = "<image>"
# The processor divides an image into tiles of this size, and adds the whole image as one more tile.
_TILE_SIZE, _PATCH_SIZE, _SCALE = 56, 14, 2
_TILE_TOKENS = (_TILE_SIZE // _PATCH_SIZE // _SCALE) ** 2
_MAX_TILES = 2
_SPECIAL = (
    IMAGE_TOKEN,
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
)
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + IMAGE_TOKEN + "\n"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def _config(image_token_id: int) -> Any:
    return transformers.Idefics3Config(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": _TILE_SIZE,
            "patch_size": _PATCH_SIZE,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "tie_word_embeddings": False,
        },
        image_token_id=image_token_id,
        scale_factor=_SCALE,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _write_tokenizer(directory: Path) -> int:
    """Writes the demo models' tokenizer with tokens for images; returns the placeholder's ID."""
    source = Path(demo_model.ensure("demo-2-layers", weights=False))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    first = 1 + max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in added))
    for token_id, content in enumerate(_SPECIAL, start=first):
        added.append({**added[0], "id": token_id, "content": content})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["chat_template"] = _TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return first


def write_image_model(directory: Path) -> str:
    """Writes a checkpoint in the form of Idefics 3: SigLIP in front of a Llama."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(3)
    config = _config(_write_tokenizer(directory))
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim > 1:
                # The range is wider than a trained model's initial one, so that tokens vary.
                wide = torch.randn(weights.shape, generator=generator)
                weights.copy_(wide * 1.5 / weights[0].numel() ** 0.5)
    model.save_pretrained(directory)
    processor = {
        "image_processor_type": "Idefics3ImageProcessor",
        "processor_class": "Idefics3Processor",
        "do_image_splitting": True,
        "size": {"longest_edge": _MAX_TILES * _TILE_SIZE},
        "max_image_size": {"longest_edge": _TILE_SIZE},
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = {"processor_class": "Idefics3Processor", "image_seq_len": _TILE_TOKENS}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return str(directory)


def png(seed: int, width: int = 80, height: int = 60) -> bytes:
    """Returns the file of an image of random pixels."""
    pixels = random.Random(seed).randbytes(3 * width * height)
    file = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(file, "PNG")
    return file.getvalue()
