"""LoRA adapters on real vLLM: handed over, and never mixed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import vllm_cases as cases
from safetensors.torch import save_file
from vllm_cluster import CONFIG, Cluster, start_cluster, stop_cluster
from vllm_programs import PlainVllm

from baton.client.errors import NotFoundError

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

RANK = 4
NAMES = ("clerk", "poet")


def make_adapter(directory: Path, model: str, seed: int) -> str:
    """A LoRA of random weights in peft's form, strong enough to change what is said."""
    shape = json.loads((Path(model) / "config.json").read_text())
    hidden, head = shape["hidden_size"], shape["head_dim"]
    sizes = {
        "q_proj": shape["num_attention_heads"] * head,
        "k_proj": shape["num_key_value_heads"] * head,
        "v_proj": shape["num_key_value_heads"] * head,
    }
    source = torch.Generator().manual_seed(seed)
    weights = dict[str, torch.Tensor]()
    for layer in range(shape["num_hidden_layers"]):
        for name, size in sizes.items():
            where = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{where}.lora_A.weight"] = torch.randn(RANK, hidden, generator=source)
            weights[f"{where}.lora_B.weight"] = torch.randn(size, RANK, generator=source) / 4
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    config |= {"target_modules": list(sizes), "task_type": "CAUSAL_LM"}
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def adapters(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, model, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def plain_tuned(
    model: str, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainVllm]:
    given = {"adapters": adapters, "cases": cases.adapter_cases(["", *NAMES])}
    given["stop_candidates"] = []
    with PlainVllm(model, given, tmp_path_factory.mktemp("plain")) as program:
        yield program


@pytest.fixture(scope="module")
def answered(plain_tuned: PlainVllm) -> list[cases.Case]:
    return plain_tuned.result()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tuned(
    model: str,
    adapters: dict[str, str],
    plain_tuned: PlainVllm,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Cluster]:
    # Nothing is between its workers.
    transfer = {**CONFIG["kv_transfer"], "advertise_host": ""}
    config: dict[str, Any] = {**CONFIG, "kv_transfer": transfer, "lora_adapters": adapters}
    started = start_cluster({"model": model, **config}, tmp_path_factory.mktemp("tuned"))
    yield started
    stop_cluster(started)


async def test_each_adapter_says_what_it_says_in_plain_vllm(
    tuned: Cluster, answered: list[cases.Case]
) -> None:
    said = {case["name"]: case["expected"]["token_ids"] for case in answered}
    longest = [f"adapter-{cases.CHUNK + 1}-{name}" for name in ("", *NAMES)]
    assert len({tuple(said[name]) for name in longest}) == len(longest)
    async with tuned.client() as client:

        async def tokens(case: cases.Case) -> list[int]:
            model = case["adapter"]
            made = await client.complete(
                case["prompt"], model=model, timeout_s=60, **case["sampling"]
            )
            assert made.model == (model or "demo-v1")
            return list(made.token_ids)

        before = tuned.handoff_tokens()
        # One at a time, equal prompts of different adapters after each other; then at once, when
        # all of them are in some cache.
        wanted = [case["expected"]["token_ids"] for case in answered]
        assert [await tokens(case) for case in answered] == wanted
        # Each had a handoff of its own: no prefix cache gave what another's had put there. The last
        # one's report may come after its answer.
        wanted_tokens = sum(before.values()) + sum(len(case["prompt"]) for case in answered)
        async with asyncio.timeout(10):
            while sum((after := tuned.handoff_tokens()).values()) < wanted_tokens:
                await asyncio.sleep(0.02)
        assert sum(after.values()) == wanted_tokens
        assert list(await asyncio.gather(*map(tokens, answered))) == wanted
        assert [one.name for one in (await client.model()).adapters] == list(NAMES)
        with pytest.raises(NotFoundError, match="'clerk' and 'poet'"):
            await client.complete([5, 6, 7], model="baker", max_tokens=2)
    await tuned.assert_idle()
