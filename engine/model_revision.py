"""Tells apart models whose KV caches differ: by their weights and by their configuration.

Workers with different revisions hand nothing over to each other, and use no files of each other.
Keys are cached after RoPE, so the same weights with other RoPE parameters make another cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from baton.engine.file_digest import file_digest

# Digits of a commit or a digest; 64 bits.
_NUM_DIGITS = 16
_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
# Files that vLLM does not load (filter_files_not_needed_for_inference of its weight_utils.py).
_NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
# Configurations of models on a hub: Hugging Face's and Mistral's.
_CONFIGS = ("config.json", "params.json")
# Configurations of the processors of images and other media.
_PROCESSORS = "*processor_config.json"
# Keys of a configuration that differ between copies of one model, and change no result.
_IGNORED = frozenset({"_name_or_path", "_commit_hash", "transformers_version", "use_cache"})
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# vLLM scales Llama 4's queries by their position only if the context is longer than this
# (vllm/model_executor/models/llama4.py).
_LLAMA_4_TOKENS = 32768


def model_revision(model: Any) -> str:
    """Returns a digest of the weights and a digest of the configuration, joined by a dot.

    Args:
        model: vLLM's ModelConfig, with the user's `hf_overrides` applied.
    """
    config = _canonical(model.hf_config.to_dict())
    text = json.dumps([config, _length_rules(model, config)], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:_NUM_DIGITS]
    return f"{weights_revision(model)}.{digest}"


def weights_revision(model: Any) -> str:
    """Returns a digest of local weight files, or the commit of a hub ID.

    If the commit is not known, as with weights in an object store, it returns their name.

    Args:
        model: vLLM's ModelConfig.
    """
    if not model.model_weights:
        path = Path(model.model)
        if path.is_file():
            return file_digest([path])
        if path.is_dir():
            return file_digest(
                one
                for one in path.iterdir()
                # A pipe could only be read once, and may never end.
                if one.suffix in _WEIGHTS and one.name not in _NOT_WEIGHTS and one.is_file()
            )
        for name in _CONFIGS:
            # vLLM has just downloaded one of them.
            with contextlib.suppress(HFValidationError):
                found = try_to_load_from_cache(model.model, name, revision=model.revision)
                if isinstance(found, str):
                    return _commit(found)
    return f"{model.model_weights or model.model}@{model.revision or 'main'}"


def computation(model: Any) -> str:
    """Returns the settings by which an engine makes another KV cache of the same model and tokens.

    They are: quantization while the weights are loaded, the type of activations, and how images are
    prepared. The keys that vLLM makes of blocks name an image by its own bytes, so files that
    outlive an engine must tell these settings apart. The workers of a cell may differ in them on
    purpose, so they are no part of a revision.

    Args:
        model: vLLM's ModelConfig.
    """
    images = model.multimodal_config
    settings = {
        "quantization": model.quantization,
        "quantization_config": model.quantization_config,
        "dtype": str(model.dtype),
        "mm_processor_kwargs": images.mm_processor_kwargs if images else None,
        "media_io_kwargs": images.media_io_kwargs if images else None,
        # The commit of a hub ID covers these files.
        "processor": file_digest(Path(model.model).glob(_PROCESSORS)) if images else None,
    }
    return json.dumps(_canonical(settings), sort_keys=True)


def downloaded_commit(repository: str, file: str) -> str:
    """Returns the latest commit of a hub ID, and downloads one of its files for that.

    Args:
        repository: The hub ID.
        file: A small file of the repository.

    Returns:
        The commit; the hub ID if the hub does not have it and it was not downloaded before.
    """
    try:
        return _commit(hf_hub_download(repository, file))
    except (OSError, ValueError, RuntimeError, HfHubHTTPError):
        return repository


def _commit(file: str) -> str:
    """Returns the commit of a downloaded file; it is the name of the file's directory."""
    return Path(file).parent.name[:_NUM_DIGITS]


def _length_rules(model: Any, config: Any) -> list[bool]:
    """Returns the choices that vLLM makes for all tokens by `max_model_len`.

    LongRoPE's factors depend on it (phi3_long_rope_scaled_rope.py of vLLM).
    """
    rules = [model.max_model_len > most for most in _long_ropes(config)]
    if str(config.get("model_type", "")).startswith("llama4"):
        given = {**model.try_get_generation_config(), **model.override_generation_config}
        is_long = model.max_model_len > _LLAMA_4_TOKENS
        rules.append(bool(given.get("attn_temperature_tuning", is_long)))
    return rules


def _long_ropes(node: Any, original: int | None = None) -> Iterator[int]:
    """Yields the original context of each LongRoPE below a node of a configuration."""
    if isinstance(node, list):
        for child in node:
            yield from _long_ropes(child, original)
    if isinstance(node, dict):
        original = node.get("original_max_position_embeddings", original)
        if original is not None and {"longrope", "su"} & {node.get("rope_type"), node.get("type")}:
            yield original
        for _, child in sorted(node.items()):
            yield from _long_ropes(child, original)


def _canonical(value: Any) -> Any:
    """Returns a value as JSON has it, equal for equal configurations in every process."""
    if isinstance(value, dict):
        return {str(key): _canonical(each) for key, each in value.items() if key not in _IGNORED}
    if isinstance(value, list | tuple):
        return [_canonical(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    if value is None or isinstance(value, str | int | float):
        return value
    if hasattr(value, "to_dict"):
        return _canonical(value.to_dict())
    return _ADDRESS.sub("", str(value))
