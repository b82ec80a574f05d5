"""Requests through real processes: the tokens are right and nothing stays in use."""

import asyncio
import random

import pytest

from baton.client import AdminClient, BatonClient, Finished, Tokens
from baton.client.errors import DeadlineExceededError, InvalidArgumentError


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [5 + (17 * index + 31 * salt + length) % 400 for index in range(length)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 300, 1000, 2000])
async def test_prompts_of_any_length_give_the_right_tokens(cluster, client, length):
    prompt = prompt_of(length)
    done = await client.complete(prompt, max_tokens=20, timeout_s=60)
    assert done.token_ids == cluster.expected(prompt, 20)
    assert done.text == cluster.vocabulary.tokenizer.decode(list(done.token_ids))
    assert done.usage.prompt_tokens == length
    stages = {stage.stage: stage.worker_id for stage in done.finished.budget.stages}
    assert (stages["prefill"], stages["decode"]) == ("p1", "d1")


async def test_concurrent_requests_get_their_own_tokens(cluster, client):
    prompts = [prompt_of(1 + 23 * salt % 700, salt) for salt in range(60)]
    answers = await asyncio.gather(
        *(client.complete(prompt, max_tokens=25, timeout_s=60) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == cluster.expected(prompt, 25)


async def test_the_decode_worker_loads_prompts_and_does_not_compute_them(cluster, client):
    steps_before = await _decode_steps(cluster)
    await client.complete(prompt_of(900), max_tokens=5, timeout_s=60)
    await cluster.nothing_left()
    num_steps = await _decode_steps(cluster) - steps_before
    # The decode worker runs one step per token and no step for the 900 prompt tokens.
    assert num_steps == 4


async def _decode_steps(cluster) -> int:
    async with AdminClient(cluster.address) as admin:
        return next(
            worker.load.num_steps
            for worker in await admin.list_workers()
            if worker.worker_id == "d1"
        )


async def test_max_tokens_1_and_stop_strings(cluster, client):
    prompt = prompt_of(40)
    text = cluster.vocabulary.tokenizer.decode(list(cluster.expected(prompt, 12)))
    one = await client.complete(prompt, max_tokens=1)
    assert (one.token_ids, one.finish_reason) == (cluster.expected(prompt, 1), "length")
    stop = text[len(one.text) - 1 : len(one.text) + 2]
    stopped = await client.complete(prompt, max_tokens=12, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.finished.stop == stop
    assert stopped.text == text[: text.index(stop)]


async def test_cancel_after_any_number_of_events(cluster, client):
    """Cancels after submission, after acceptance, after the first token, and while decoding."""

    async def cancelled_after(count: int, salt: int) -> None:
        # The output takes 5 s or more, so that the cancellation always comes first.
        stream = client.generate(prompt_of(700, salt), max_tokens=1300, timeout_s=60)
        seen = 0
        if count == 0:
            stream.cancel()
        async for event in stream:
            seen += 1
            if seen == count:
                stream.cancel()
            if isinstance(event, Finished):
                assert event.reason == "cancelled"

    await asyncio.gather(*(cancelled_after(salt % 6, salt) for salt in range(24)))


async def test_cancel_at_any_moment(cluster, client):
    chosen = random.Random(7)

    async def cancelled(salt: int) -> None:
        stream = client.generate(prompt_of(900, salt), max_tokens=1100, timeout_s=60)
        asyncio.get_running_loop().call_later(chosen.uniform(0, 0.6), stream.cancel)
        async for event in stream:
            if isinstance(event, Finished):
                assert event.reason == "cancelled"

    await asyncio.gather(*(cancelled(salt) for salt in range(24)))
    assert (await client.complete([9, 9], max_tokens=3)).token_ids == cluster.expected([9, 9], 3)


async def test_a_disconnected_client_leaves_nothing_in_use(cluster):
    async with BatonClient(cluster.address) as client:
        streams = [client.generate(prompt_of(600, salt), max_tokens=900) for salt in range(8)]
        for stream in streams[:4]:
            async for event in stream:
                if isinstance(event, Tokens):
                    break
    await cluster.nothing_left()


async def test_a_deadline_ends_a_request_everywhere(cluster, client):
    with pytest.raises(DeadlineExceededError):
        await client.complete(prompt_of(100), max_tokens=1500, timeout_s=0.4)


async def test_bad_input_names_the_field(cluster, client):
    with pytest.raises(InvalidArgumentError, match="max_tokens"):
        await client.complete(prompt_of(2000), max_tokens=100)
    with pytest.raises(InvalidArgumentError, match="token"):
        await client.complete([10**6], max_tokens=1)
