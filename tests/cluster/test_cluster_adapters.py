"""LoRA adapters on the simulated engine, where each adapter has its own tokens and KV bytes."""

import asyncio

import pytest

from baton.client.errors import NotFoundError
from tests.cluster.processes import ADAPTERS

NAMES = ("", *ADAPTERS)


def prompt_of(length: int, salt: int) -> list[int]:
    return [5 + (13 * index + 29 * salt + length) % 400 for index in range(length)]


async def test_a_prompt_of_each_adapter_gets_its_own_tokens_from_its_own_blocks(cluster, client):
    """All adapters get the same prompts concurrently, twice; they must not share KV blocks."""
    prompts = [prompt_of(20 + 90 * salt, salt) for salt in range(6)]
    for _ in range(2):
        wanted = [(prompt, name) for prompt in prompts for name in NAMES]
        answers = await asyncio.gather(
            *(
                client.complete(prompt, model=name, max_tokens=15, timeout_s=60)
                for prompt, name in wanted
            )
        )
        for (prompt, name), answer in zip(wanted, answers, strict=True):
            assert answer.token_ids == cluster.expected(prompt, 15, name)
            assert answer.model == (name or "demo")
    assert len({cluster.expected(prompts[0], 15, name) for name in NAMES}) == len(NAMES)
    # A prefix that one adapter cached is reused for that adapter only.
    prompt = prompt_of(600, 77)
    for name, cached in ((ADAPTERS[0], False), (ADAPTERS[1], False), (ADAPTERS[0], True)):
        answer = await client.complete(prompt, model=name, max_tokens=2)
        assert answer.token_ids == cluster.expected(prompt, 2, name)
        assert (answer.usage.cached_prompt_tokens > 0) == cached
    await cluster.nothing_left()


async def test_adapters_are_listed_and_unknown_ones_refused_by_name(cluster, client):
    model = await client.model()
    assert [one.name for one in model.adapters] == list(ADAPTERS)
    message = "model is 'baker'; this coordinator serves 'demo' and 'clerk' and 'poet'"
    with pytest.raises(NotFoundError, match=message):
        await client.complete([5, 6, 7], model="baker", max_tokens=2)
