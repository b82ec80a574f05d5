"""Chats whose last turn is the begin of the answer, through a cluster on the simulated engine."""

import httpx2 as httpx
import pytest
from openai import BadRequestError

WAIT_S = 300.0
QUESTION = {"role": "user", "content": "What is a baton?"}
BEGUN = "A baton is"
TURNS = [QUESTION, {"role": "assistant", "content": BEGUN}]
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture
async def post(gateway):
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:

        async def send(route, **body):
            return await http.post(route, json={"model": "demo", **body})

        yield send


@pytest.fixture
async def prompt(post):
    """Token IDs of the continued chat."""
    return (await post("/tokenize", messages=TURNS, **CONTINUED)).json()["tokens"]


@pytest.fixture
def text_of(cluster):
    return lambda ids: cluster.vocabulary.tokenizer.decode(list(ids), skip_special_tokens=False)


async def test_the_prompt_ends_inside_the_last_turn(post, prompt, text_of):
    new = (await post("/tokenize", messages=[QUESTION])).json()["tokens"]
    assert text_of(prompt) == text_of(new) + BEGUN
    # Without the field, the turn has its end.
    ended = await post("/tokenize", messages=TURNS, add_generation_prompt=False)
    assert text_of(ended.json()["tokens"]).startswith(text_of(prompt) + "</s>")
    # Parts of a text are joined as in other turns.
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": BEGUN}]
    turns = [QUESTION, {"role": "assistant", "content": parts}]
    joined = (await post("/tokenize", messages=turns, **CONTINUED)).json()["tokens"]
    assert text_of(joined) == f"{text_of(new)}A\n{BEGUN}"


async def test_a_chat_is_continued_as_it_is_tokenized(openai, cluster, prompt, text_of):
    asked = {"model": "demo", "messages": TURNS, "max_tokens": 6}
    extra = {"return_token_ids": True, **CONTINUED}
    whole = await openai.chat.completions.create(**asked, extra_body=extra)
    expected = cluster.expected(prompt, 6)
    assert whole.prompt_token_ids == prompt
    assert whole.usage.prompt_tokens == len(prompt)
    assert whole.choices[0].token_ids == list(expected)
    # Only the continuation is in the answer.
    assert whole.choices[0].message.content == text_of(expected)
    assert whole.choices[0].message.role == "assistant"
    stream = await openai.chat.completions.create(**asked, stream=True, extra_body=CONTINUED)
    said = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(said) == text_of(expected)


@pytest.mark.parametrize("route", ["/tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("continue_final_message", {"add_generation_prompt": True}),
        # As in vLLM, where it is true by default.
        ("continue_final_message", {"add_generation_prompt": None}),
        ("messages[0].role", {"messages": [QUESTION]}),
        ("messages[1].content", {"messages": [QUESTION, {"role": "assistant", "content": ""}]}),
        ("messages[1].content", {"messages": [QUESTION, {"role": "assistant", "content": None}]}),
        ("messages[1]", {"messages": [QUESTION, {**TURNS[1], "tool_calls": [CALL]}]}),
        ("continue_final_message", {"continue_final_message": "yes"}),
    ],
    ids=str,
)
async def test_a_chat_that_cannot_be_continued_is_refused(post, route, param, body):
    answer = await post(route, **{"messages": TURNS, **CONTINUED, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(f"{param} is ")
    if "add_generation_prompt" in body:
        assert "add_generation_prompt" in error["message"]


async def test_completions_have_no_turn_to_continue(openai):
    extra = {"continue_final_message": True}
    with pytest.raises(BadRequestError) as refused:
        await openai.completions.create(model="demo", prompt="a", extra_body=extra)
    assert refused.value.param == "continue_final_message"


@pytest.mark.vllm
async def test_a_message_continues_its_prefill(gateway, cluster, prompt, text_of):
    pytest.importorskip("baton.gateway.anthropic_messages")
    import anthropic

    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, "http_client": http}
    expected = text_of(cluster.expected(prompt, 6))
    async with anthropic.AsyncAnthropic(base_url=gateway.url, **options) as client:
        body = {"model": "demo", "messages": TURNS}
        counted = await client.messages.count_tokens(**body)
        # A last turn that cannot be continued counts as finished.
        finished = [*TURNS[:-1], {"role": "assistant", "content": "It is "}]
        others = await client.messages.count_tokens(model="demo", messages=finished)
        whole = await client.messages.create(**body, max_tokens=6)
        async with client.messages.stream(**body, max_tokens=6) as events:
            streamed = await events.get_final_message()
    assert counted.input_tokens == len(prompt)
    assert others.input_tokens > 0
    for found in (whole, streamed):
        assert [one.text for one in found.content] == [expected]
        assert found.usage.input_tokens == len(prompt)
