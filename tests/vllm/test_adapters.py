"""LoRA adapters on real vLLM: prompts are handed over, and adapters are never mixed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from baton.client.client import BatonClient
from baton.client.errors import NotFoundError
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_adapters import NAMES
from tests.vllm.vllm_cluster import Cluster
from tests.vllm.vllm_programs import PlainVllm

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]


# This plain vLLM answers while the cluster starts.
@pytest.fixture(scope="session")
def plain_tuned(
    model: str, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PlainVllm]:
    given = {"adapters": adapters, "cases": cases.adapter_cases(["", *NAMES])}
    with PlainVllm(model, given, tmp_path_factory.mktemp("plain")) as program:
        yield program


async def test_each_adapter_answers_as_in_plain_vllm(
    plain_tuned: PlainVllm, client: BatonClient, cluster: Cluster
) -> None:
    answered = plain_tuned.result()
    said = {case["name"]: case["expected"]["token_ids"] for case in answered}
    longest = [f"adapter-{cases.CHUNK + 1}-{name}" for name in ("", *NAMES)]
    assert len({tuple(said[name]) for name in longest}) == len(longest)

    async def tokens(case: cases.Case) -> list[int]:
        model = case["adapter"]
        made = await client.complete(case["prompt"], model=model, timeout_s=60, **case["sampling"])
        assert made.model == (model or "demo-v1")
        return list(made.token_ids)

    before = cluster.handoff_tokens()
    # First one request at a time, with equal prompts of different adapters in sequence; then all at
    # once, when the caches hold all prompts.
    wanted = [case["expected"]["token_ids"] for case in answered]
    assert [await tokens(case) for case in answered] == wanted
    # Each request had its own handoff: no prefix cache mixed adapters. The report of the last
    # handoff may come after its answer.
    wanted_tokens = before + sum(len(case["prompt"]) for case in answered)
    async with asyncio.timeout(120):
        while (after := cluster.handoff_tokens()) < wanted_tokens:
            await asyncio.sleep(0.02)
    assert after == wanted_tokens
    assert list(await asyncio.gather(*map(tokens, answered))) == wanted
    assert [one.name for one in (await client.model()).adapters] == list(NAMES)
    with pytest.raises(NotFoundError, match="'clerk' and 'poet'"):
        await client.complete([5, 6, 7], model="baker", max_tokens=2)
    await cluster.assert_idle()
