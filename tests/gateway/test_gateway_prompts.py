"""Responses that show their prompts: as text, as token IDs and with logprobs."""

import httpx2 as httpx
import pytest
from openai import BadRequestError

from baton.client import AdminClient
from baton.runtime.config_error import ConfigError
from baton.runtime.prompts.tokenization import Tokenizer

PROMPT = [5, 6, 7, 8]
TURNS = [{"role": "user", "content": "What is a baton?"}]
WAIT_S = 300.0


@pytest.fixture
def text_of(cluster):
    return lambda ids: cluster.vocabulary.tokenizer.decode(list(ids), skip_special_tokens=False)


def ids_of(cluster, text):
    return cluster.vocabulary.tokenizer.encode(text).ids


async def chunks(answer):
    return [chunk.choices[0] async for chunk in await answer]


@pytest.mark.parametrize("number", [0, 2])
async def test_prompts_have_logprobs(openai, cluster, text_of, number):
    extra = {"prompt_logprobs": number}
    answer = await openai.completions.create(
        model="demo", prompt=[PROMPT, [9, 10]], n=2, max_tokens=2, extra_body=extra
    )
    prompts = [PROMPT, PROMPT, [9, 10], [9, 10]]
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        first, *rest = choice.prompt_logprobs
        assert first is None
        assert [next(iter(one)) for one in rest] == [str(token) for token in prompt[1:]]
        for token, one in zip(prompt[1:], rest, strict=True):
            assert len(one) == max(1, number)
            assert one[str(token)]["rank"] == 1
            assert one[str(token)]["decoded_token"] == text_of([token])
            assert one[str(token)]["logprob"] < 0
        assert choice.text == text_of(cluster.expected(prompt, 2))
    chat = await openai.chat.completions.create(
        model="demo", messages=TURNS, max_tokens=2, extra_body=extra
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
    assert chat.prompt_logprobs[0] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_echo_puts_prompts_first(openai, cluster, text_of, max_tokens, stream):
    """Text prompts are echoed unchanged, token IDs as text."""
    for prompts, texts in ((["one", "two"], ["one", "two"]), (PROMPT, [text_of(PROMPT)])):
        asked = {"model": "demo", "prompt": prompts, "max_tokens": max_tokens, "echo": True}
        found = [""] * len(texts)
        if stream:
            for choice in await chunks(openai.completions.create(**asked, stream=True)):
                found[choice.index] += choice.text
        else:
            answer = await openai.completions.create(**asked)
            for choice in answer.choices:
                found[choice.index] = choice.text
        inputs = [PROMPT] if prompts is PROMPT else [ids_of(cluster, text) for text in texts]
        outputs = [text_of(cluster.expected(ids, max_tokens)) for ids in inputs]
        assert found == [text + output for text, output in zip(texts, outputs, strict=True)]


@pytest.mark.parametrize("prompt", ["What is a flip?", PROMPT], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_with_logprobs_returns_what_lm_eval_reads(
    openai, cluster, text_of, prompt, max_tokens
):
    """lm-eval computes the likelihood of a continuation in this way."""
    answer = await openai.completions.create(
        model="demo", prompt=prompt, max_tokens=max_tokens, logprobs=1, echo=True, temperature=0
    )
    ids = ids_of(cluster, prompt) if isinstance(prompt, str) else prompt
    logprobs = answer.choices[0].logprobs
    shown = [*ids, *cluster.expected(ids, max_tokens)]
    assert logprobs.tokens == [text_of([token]) for token in shown]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(one < 0 for one in logprobs.token_logprobs[1:])
    for token, logprob, top in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    )[1:]:
        assert top == {token: logprob}
    offsets = [len("".join(logprobs.tokens[:index])) for index in range(len(shown))]
    assert logprobs.text_offset == offsets
    assert answer.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("prompt", ["What is a flip?", PROMPT], ids=["text", "ids"])
async def test_completions_return_token_ids(openai, cluster, prompt):
    ids = ids_of(cluster, prompt) if isinstance(prompt, str) else prompt
    asked = {"model": "demo", "prompt": prompt, "max_tokens": 5}
    extra = {"return_token_ids": True}
    (choice,) = (await openai.completions.create(**asked, extra_body=extra)).choices
    assert choice.prompt_token_ids == ids
    assert choice.token_ids == list(cluster.expected(ids, 5))
    first, *rest = await chunks(openai.completions.create(**asked, stream=True, extra_body=extra))
    assert first.prompt_token_ids == ids
    assert not any(hasattr(one, "prompt_token_ids") for one in rest)
    assert [token for one in (first, *rest) for token in one.token_ids] == choice.token_ids


async def test_chats_return_token_ids(openai, cluster):
    asked = {"model": "demo", "messages": TURNS, "max_tokens": 5}
    extra = {"return_token_ids": True, "add_generation_prompt": False}
    whole = await openai.chat.completions.create(**asked, extra_body=extra)
    assert len(whole.prompt_token_ids) == whole.usage.prompt_tokens
    assert whole.choices[0].token_ids == list(cluster.expected(whole.prompt_token_ids, 5))
    stream = await openai.chat.completions.create(**asked, stream=True, extra_body=extra)
    first, *rest = [chunk async for chunk in stream]
    assert first.prompt_token_ids == whole.prompt_token_ids
    assert not any(hasattr(one, "prompt_token_ids") for one in rest)
    tokens = [token for one in (first, *rest) for token in one.choices[0].token_ids]
    assert tokens == whole.choices[0].token_ids


async def test_fields_that_need_the_tokenizer_are_refused_without_its_files(
    openai, cluster, monkeypatch
):
    def read(tokenizer, model):
        raise ConfigError(f"model: no such directory: {model}")

    monkeypatch.setattr(Tokenizer, "__init__", read)
    for field, body in (
        ("echo", {"prompt": PROMPT, "echo": True}),
        ("echo", {"prompt": "x", "logprobs": 1, "echo": True}),
        ("return_token_ids", {"prompt": "x", "extra_body": {"return_token_ids": True}}),
    ):
        with pytest.raises(BadRequestError, match="tokenizer") as caught:
            await openai.completions.create(model="demo", max_tokens=1, **body)
        assert caught.value.param == field
    answer = await openai.completions.create(model="demo", prompt="x", max_tokens=0, echo=True)
    assert answer.choices[0].text == "x"


async def test_the_body_may_set_the_request_id(openai, gateway, cluster):
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "request_id": "by-body"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/completions", json=body)
        assert answer.json()["id"] == answer.headers["x-request-id"] == "by-body"
        headers = {"x-request-id": "by-header"}
        answer = await http.post(f"{gateway.url}/v1/completions", json=body, headers=headers)
        assert answer.json()["id"] == "by-header"
    async with AdminClient(cluster.address) as admin:
        ids = {one.request_id for one in await admin.list_requests(include_ended=True)}
    assert {"by-body", "by-header"} <= ids
