"""Outputs through the cluster equal those of one plain vLLM, token for token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.client.client import BatonClient
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import Cluster

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CONCURRENCY = 8


async def answer(client: BatonClient, case: cases.Case) -> dict[str, Any]:
    sampling = dict(case["sampling"])
    if bias := sampling.pop("logit_bias", None):
        sampling["logit_bias"] = {int(token): value for token, value in bias.items()}
    made = await client.complete(case["prompt"], timeout_s=60, **sampling)
    return {
        "token_ids": list(made.token_ids),
        "text": made.text,
        "finish": made.finish_reason,
        "stop": made.finished.stop,
        "logprobs": logprobs(made.logprobs),
        "prompt_logprobs": logprobs(made.finished.prompt_logprobs),
    }


def logprobs(positions: Any) -> list[list[list[Any]]]:
    return [
        [[entry.token_id, pytest.approx(entry.logprob, abs=2e-4)] for entry in position]
        for position in positions
    ]


def select(reference: list[cases.Case], *names: str) -> list[cases.Case]:
    found = [case for case in reference if case["name"].startswith(names)]
    assert found
    return found


async def differing(client: BatonClient, chosen: list[cases.Case]) -> list[str]:
    return [
        f"{case['name']}: {made} is not {case['expected']}"
        for case in chosen
        if (made := await answer(client, case)) != case["expected"]
    ]


@pytest.mark.proves("handoff", "compared", kind="llama")
async def test_single_requests_give_the_tokens_of_plain_vllm(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    assert not await differing(client, select(reference, "length-"))
    await cluster.assert_idle()


@pytest.mark.proves("handoff", "compared", kind="llama")
async def test_eight_concurrent_requests_give_the_tokens_of_plain_vllm(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    chosen = select(reference, "concurrent-", "length-1", "length-3", "length-5")
    room = asyncio.Semaphore(CONCURRENCY)

    async def one(case: cases.Case) -> list[str]:
        async with room:
            return await differing(client, [case])

    found = await asyncio.gather(*(one(case) for case in chosen))
    assert not [line for lines in found for line in lines]
    await cluster.assert_idle()


@pytest.mark.proves("prefix reuse", "compared", kind="llama")
async def test_cached_prefixes_do_not_change_tokens(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    # The second round hits the caches of both workers, whole prompts and parts of them.
    for _ in range(2):
        assert not await differing(client, select(reference, "prefix-"))
    await cluster.assert_idle()


@pytest.mark.proves("handoff", "compared", kind="llama")
async def test_each_prompt_token_is_loaded_once(client: BatonClient, cluster: Cluster) -> None:
    prompts = [cases.prompt(length, 900 + length) for length in (167, 545, 773)]
    before = cluster.handoff_tokens()
    for prompt in prompts:
        await client.complete(prompt, timeout_s=60, max_tokens=4, temperature=0)
    num_tokens = sum(map(len, prompts))
    async with asyncio.timeout(120):
        # The metric changes with the worker's next load report.
        while cluster.handoff_tokens() < before + num_tokens:
            await asyncio.sleep(0.05)
    assert cluster.handoff_tokens() == before + num_tokens
    await cluster.assert_idle()


@pytest.mark.proves("seeds", "compared", kind="llama")
async def test_sampling_parameters_give_the_tokens_of_plain_vllm(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    # All sampling cases.
    chosen = select(reference, *(case["name"] for case in cases.sampling_cases()))
    assert not await differing(client, chosen)
    await cluster.assert_idle()


@pytest.mark.proves("seeds", "compared", kind="llama")
async def test_seeded_requests_with_several_prefill_chunks_give_equal_tokens(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    """The prompts run alone, and beside others, which moves the chunk boundaries."""
    chosen = select(reference, "chunked-seed-")
    assert not await differing(client, chosen)
    others = select(reference, "seed-1", "seed-2", "length-769", "length-513")
    found = await asyncio.gather(*(differing(client, [case]) for case in chosen + others))
    assert not [line for lines in found for line in lines]
    await cluster.assert_idle()


async def test_stop_strings_that_span_both_workers_end_the_output(
    client: BatonClient, cluster: Cluster, reference: list[cases.Case]
) -> None:
    chosen = select(reference, "stop-")
    # A stop string at 1 begins in the prefill worker's token and ends in the decode worker's first.
    assert sum("-at-1-" in case["name"] for case in chosen) >= 8
    assert not await differing(client, chosen)
    await cluster.assert_idle()
