"""Chats with images through real processes on the simulated engine."""

import asyncio
import base64
import signal

import pytest

from baton.client import BatonClient, ChatMessage, Tokens
from baton.client.errors import InvalidArgumentError, ResourceExhaustedError
from baton.client.request import build
from baton.engine.sim_images import ImageRenderer
from baton.engine.sim_tokens import expected_tokens
from baton.runtime.prompts.prompt_images import keyed_tokens
from tests.cluster.test_cluster_deaths import DYING, completed, worker_of

# The simulated engine reads no pixels, and the coordinator the first bytes only.
PNG = b"\x89PNG\r\n\x1a\n"
NUM_IMAGE_TOKENS = 40
BLOCK_SIZE = 16
IMAGES = {"max_count": 3, "max_image_bytes": 1000, "max_bytes": 2000, "max_held_bytes": 3000}
SIMULATED = {"image_tokens": NUM_IMAGE_TOKENS}


def turns(*parts: str | bytes, text: str = "What is it?"):
    content = [
        {"type": "image", "image": part}
        if isinstance(part, bytes)
        else {"type": "text", "text": part}
        for part in (*parts, text)
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def renderer(model):
    renderer = ImageRenderer(model, NUM_IMAGE_TOKENS)
    yield renderer
    renderer.close()


@pytest.fixture
def expected(renderer):
    """Returns the tokens that follow a chat, and the number of its prompt's tokens."""

    def of(cluster, prompt, num_tokens):
        rendered = renderer.render(build(prompt, {}).chat)
        keyed = keyed_tokens(rendered.token_ids, rendered.images)
        tokens = expected_tokens(cluster.vocabulary, keyed, num_tokens)
        return tuple(tokens), len(rendered.token_ids)

    return of


@pytest.fixture
async def images(new_cluster):
    cluster = new_cluster("p1", "d1", elastic=False, images=IMAGES, simulated=SIMULATED)
    await cluster.serving()
    async with BatonClient(cluster.address) as client:
        yield cluster, client
    await cluster.nothing_left()


async def test_an_image_is_a_part_of_the_prompt(images, expected):
    cluster, client = images
    one, other = turns(PNG + b"a"), turns(PNG + b"b")
    answers = {}
    for name, prompt in (("one", one), ("other", other), ("one again", one)):
        answers[name] = await client.complete(prompt, max_tokens=20)
        tokens, num_prompt_tokens = expected(cluster, prompt, 20)
        assert answers[name].token_ids == tokens, name
        assert answers[name].usage.prompt_tokens == num_prompt_tokens > NUM_IMAGE_TOKENS
    assert answers["one"].token_ids != answers["other"].token_ids
    # Both prompts have the same tokens, but the image begins in the first block.
    assert answers["one"].usage.cached_prompt_tokens == 0
    assert answers["other"].usage.cached_prompt_tokens == 0
    cached = answers["one again"].usage.cached_prompt_tokens
    assert cached == (num_prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    # The same file as a data URL, between texts, and a second image.
    url = f"data:image/png;base64,{base64.b64encode(PNG + b'a').decode()}"
    parts = [
        {"type": "text", "text": "Compare"},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": PNG + b"b"},
    ]
    two = [ChatMessage("system", "Be brief."), ChatMessage("user", parts)]
    answer = await client.complete(two, max_tokens=20, seed=3, temperature=1.0)
    assert answer.token_ids == expected(cluster, two, 20)[0]

    refusals = {
        "messages[0].parts[0].image is '1009 bytes'": turns(PNG + b"x" * 1001),
        "messages[0].parts[0].image is b'GIF8": turns(b"GIF8 no image"),
        "messages[0].parts[2].image is '2712 bytes'": turns(*[PNG + b"x" * 896] * 3),
        "messages[0].parts[3].image is 'image 4'": turns(*[PNG] * 4),
    }
    for message, prompt in refusals.items():
        with pytest.raises(InvalidArgumentError) as caught:
            await client.complete(prompt, max_tokens=2)
        assert message in str(caught.value)
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}]
    with pytest.raises(InvalidArgumentError, match="other URLs are not fetched"):
        await client.complete([{"role": "user", "content": parts}])

    # The files of running requests are bounded together.
    streams = [client.generate(turns(PNG + bytes(900)), max_tokens=900) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    with pytest.raises(ResourceExhaustedError, match=r"images\.max_held_bytes"):
        await client.complete(turns(PNG + bytes(900)), max_tokens=2)
    for stream in streams:
        await stream.aclose()
    await cluster.nothing_left()
    answer = await client.complete(turns(PNG + bytes(900)), max_tokens=2)
    assert answer.token_ids == expected(cluster, turns(PNG + bytes(900)), 2)[0]


@pytest.mark.parametrize("pool", ["p", "d"])
async def test_an_image_goes_to_the_worker_that_takes_over(new_cluster, expected, pool):
    simulated = {**SIMULATED, "step_base_ms": 20}
    simulated |= {"prefill_per_token_ms": 8} if pool == "p" else {}
    cluster = new_cluster("p1", "d1", f"{pool}2", **{**DYING, "simulated": simulated})
    await cluster.serving(3)
    prompt, num_tokens = turns(PNG + b"a"), 12 if pool == "p" else 100
    async with BatonClient(cluster.address) as client:
        stream = client.generate(prompt, max_tokens=num_tokens)
        while not isinstance(await anext(stream), Tokens) and pool == "d":
            pass
        victim = await worker_of(cluster, stream, pool)
        cluster.signal(victim, signal.SIGKILL)
        assert await completed(stream) == expected(cluster, prompt, num_tokens)[0]
        # A chat that waits for a worker to render it is rendered by the next one.
        again = await client.complete(turns(PNG + b"c"), max_tokens=5)
        assert again.token_ids == expected(cluster, turns(PNG + b"c"), 5)[0]
    await cluster.nothing_left(dead=[victim])


async def test_a_resumed_request_must_have_the_same_image(new_cluster, expected):
    cluster = new_cluster("p1", "d1", elastic=False, simulated={**SIMULATED, "step_base_ms": 20})
    await cluster.serving()
    prompt = turns(PNG + b"a")
    async with BatonClient(cluster.address) as client:
        stream = client.generate(prompt, max_tokens=150)
        while not isinstance(await anext(stream), Tokens):
            pass
        await asyncio.to_thread(cluster.restart_coordinator)
        assert await completed(stream) == expected(cluster, prompt, 150)[0]
        assert stream.num_resumes == 1
    await cluster.nothing_left()


async def test_a_model_without_images_refuses_them(cluster, client):
    with pytest.raises(InvalidArgumentError, match="this model takes no images"):
        await client.complete(turns(PNG), max_tokens=2)
