"""Revisions of models and adapters: equal for equal KV caches, different for others.

tests/vllm/test_revisions.py does the same with vLLM's own configuration.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants

from baton.engine.model_revision import (
    computation,
    downloaded_commit,
    model_revision,
    weights_revision,
)
from tests.program_command import ROOT

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 256,
}
COMMITS = "1" * 40, "2" * 40


@dataclass
class Model:
    """The fields of vLLM's ModelConfig that a revision depends on."""

    model: str
    hf_config: transformers.PretrainedConfig | None = None
    max_model_len: int = 128
    revision: str | None = None
    model_weights: str = ""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    quantization: str | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: torch.dtype = torch.bfloat16
    multimodal_config: Any = None

    def try_get_generation_config(self) -> dict[str, Any]:
        return {}


def made(directory: Path, max_model_len: int = 128, **changed: object) -> Model:
    """Writes a checkpoint that has these keys in its configuration."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changed}))
    (directory / "model.safetensors").write_bytes(b"weights")
    config = transformers.AutoConfig.from_pretrained(directory)
    return Model(str(directory), config, max_model_len)


def test_copies_of_one_checkpoint_have_one_revision(tmp_path: Path) -> None:
    one = made(tmp_path / "one", transformers_version="4.1.0", use_cache=True)
    other = made(tmp_path / "other", max_model_len=400, transformers_version="5.0.0")
    assert model_revision(one) == model_revision(other)


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_another_configuration_is_another_revision(tmp_path: Path, changed: dict[str, Any]) -> None:
    one, other = made(tmp_path / "one"), made(tmp_path / "other", **changed)
    assert weights_revision(one) == weights_revision(other)
    assert model_revision(one) != model_revision(other)


def test_long_rope_has_one_revision_on_each_side_of_its_original_context(tmp_path: Path) -> None:
    short, longest_short, long, longer = (
        model_revision(made(tmp_path / "model", tokens, rope_scaling=LONG_ROPE))
        for tokens in (128, 256, 257, 512)
    )
    assert short == longest_short
    assert long == longer
    assert short != long


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization": "fp8"},
        {"quantization_config": {"linear": {"weight": "fp8"}}},
        {"dtype": torch.float16},
    ],
)
def test_quantized_while_loading_is_the_same_model_and_another_cache(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    one = made(tmp_path / "one")
    other = replace(made(tmp_path / "other"), **changed)
    assert model_revision(one) == model_revision(other)
    assert computation(one) == computation(made(tmp_path / "copy"))
    assert computation(one) != computation(other)


def odd_revision() -> str:
    """Returns the revision of a configuration with values that JSON does not have."""
    names = {f"layer {n}" for n in range(50)}
    config = transformers.LlamaConfig(dtype=torch.float16, names=names, other=(object(), {1: 2}))
    return model_revision(Model("no/model", config))


def test_a_configuration_has_one_revision_in_every_process() -> None:
    """Sets have another order in each process, and objects another address."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.engine import test_model_revision as other\n"
        "print(other.odd_revision())"
    )
    command = [sys.executable, "-c", program, ROOT]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert printed.strip() == odd_revision()


@pytest.mark.parametrize("name", ["model.safetensors", "model.bin", "model.pth", "model.pt"])
def test_weights_of_every_format_count(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"some weights")
    before = weights_revision(Model(str(tmp_path)))
    (tmp_path / "optimizer.pt").write_bytes(b"no weights")
    (tmp_path / "tokenizer.json").write_bytes(b"no weights")
    assert weights_revision(Model(str(tmp_path))) == before
    (tmp_path / name).write_bytes(b"more weights")
    assert weights_revision(Model(str(tmp_path))) != before


def test_weights_that_differ_in_some_layers_only_are_told_apart(tmp_path: Path) -> None:
    """The first and the last mebibyte are equal, as with frozen embeddings and a frozen end."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(30 * 2**20))
    before = weights_revision(Model(str(tmp_path)))
    with weights.open("r+b") as file:
        file.seek(12 * 2**20)
        file.write(b"x" * 2**20)
    assert weights_revision(Model(str(tmp_path))) != before


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with two commits of one repository; `main` is the second one."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--us--model"
    for name, commit in (("old", COMMITS[0]), ("main", COMMITS[1])):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(commit)
        directory = repository / "snapshots" / commit
        directory.mkdir(parents=True)
        for file in ("config.json", "adapter_config.json"):
            (directory / file).write_text("{}")
    return repository


def test_a_hub_id_stands_for_its_commit(hub: Path) -> None:
    assert weights_revision(Model("us/model")) == COMMITS[1][:16]
    assert weights_revision(Model("us/model", revision="old")) == COMMITS[0][:16]
    assert downloaded_commit("us/model", "adapter_config.json") == COMMITS[1][:16]
    (hub / "refs" / "main").write_text(COMMITS[0])
    assert weights_revision(Model("us/model")) == COMMITS[0][:16]
    assert downloaded_commit("us/model", "adapter_config.json") == COMMITS[0][:16]


def test_without_a_commit_the_name_counts(hub: Path) -> None:
    names = {weights_revision(Model(f"us/other-{n}")) for n in range(2)}
    assert names == {"us/other-0@main", "us/other-1@main"}
    assert downloaded_commit("us/other-0", "adapter_config.json") == "us/other-0"
    stored = Model(str(hub), model_weights="s3://bucket/model")
    assert weights_revision(stored) == "s3://bucket/model@main"
