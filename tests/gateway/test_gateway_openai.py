"""The official openai client against a cluster on the simulated engine."""

import asyncio

import httpx2 as httpx
import pytest
from openai import BadRequestError, NotFoundError
from prometheus_client.parser import text_string_to_metric_families

from baton import __version__
from baton.client import AdminClient
from tests.cluster.processes import ADAPTERS, Cluster

PROMPT = [5, 6, 7, 8]
TOOL = {"type": "function", "function": {"name": "f"}}
TURNS = [{"role": "user", "content": "What is a baton?"}]
WAIT_S = 300.0


def decoded(cluster, prompt, num_tokens):
    return cluster.vocabulary.tokenizer.decode(cluster.expected(prompt, num_tokens))


async def chunks(answer):
    return [chunk async for chunk in await answer]


async def test_a_completion_is_the_engines_output(openai, cluster):
    answer = await openai.completions.create(model="demo", prompt=PROMPT, max_tokens=9)
    (choice,) = answer.choices
    assert choice.text == decoded(cluster, PROMPT, 9)
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 9)
    assert answer.usage.total_tokens == 13
    assert (answer.model, answer.object) == ("demo", "text_completion")


async def test_a_streamed_completion_is_the_engines_output(openai, cluster):
    seen = await chunks(
        openai.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *said, last = seen
    assert "".join(chunk.choices[0].text for chunk in said) == decoded(cluster, PROMPT, 9)
    reasons = [chunk.choices[0].finish_reason for chunk in said]
    assert reasons == [None] * (len(said) - 1) + ["length"]
    # Deltas may be joined on the way, but the first token never waits for the second.
    assert 2 <= len(said) <= 9
    assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 4, 9)
    assert {chunk.id for chunk in seen} == {last.id}


async def test_a_stream_has_no_usage_by_default(openai):
    seen = await chunks(
        openai.completions.create(model="demo", prompt="x", max_tokens=2, stream=True)
    )
    assert all(chunk.usage is None and chunk.choices for chunk in seen)


async def test_a_chat_is_the_same_whole_and_streamed(openai):
    whole = await openai.chat.completions.create(model="demo", messages=TURNS, max_tokens=8)
    message = whole.choices[0].message
    assert (message.role, whole.choices[0].finish_reason) == ("assistant", "length")
    assert message.content
    seen = await chunks(
        openai.chat.completions.create(
            model="demo", messages=TURNS, max_completion_tokens=8, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in seen]
    assert "".join(delta.content for delta in deltas) == message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert seen[-1].choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8


async def test_a_response_can_be_sent_back_as_a_turn(openai):
    answer = await openai.chat.completions.create(model="demo", messages=TURNS, max_tokens=3)
    parts = [{"type": "text", "text": "And"}, {"type": "text", "text": "then?"}]
    turns = [*TURNS, answer.choices[0].message, {"role": "user", "content": parts}]
    again = await openai.chat.completions.create(model="demo", messages=turns, max_tokens=3)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_and_n_make_choices_in_order(openai, cluster, stream):
    prompts = [[5, 6, 7], [8, 9]]
    asked = openai.completions.create(
        model="demo",
        prompt=prompts,
        n=2,
        max_tokens=5,
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
    )
    texts = [""] * 4
    if stream:
        *said, last = await chunks(asked)
        for chunk in said:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        last = await asked
        for choice in last.choices:
            texts[choice.index] = choice.text
    assert texts == [decoded(cluster, prompt, 5) for prompt in prompts for _ in range(2)]
    # A prompt counts once.
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 20)


async def test_a_list_of_texts_is_a_list_of_prompts(openai):
    answer = await openai.completions.create(model="demo", prompt=["one", "two"], max_tokens=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


async def test_a_stop_string_ends_the_text_before_it(openai, cluster):
    text = decoded(cluster, PROMPT, 20)
    stop = text[10:13]
    answer = await openai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, stop=["\x00", stop]
    )
    (choice,) = answer.choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == stop


async def test_a_stop_token_is_named_by_its_id(openai, cluster):
    token = cluster.expected(PROMPT, 4)[3]
    answer = await openai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, extra_body={"stop_token_ids": [token]}
    )
    assert (answer.choices[0].finish_reason, answer.choices[0].stop_reason) == ("stop", token)


@pytest.mark.parametrize("number", [0, 2])
async def test_completions_return_logprobs(openai, number):
    answer = await openai.completions.create(
        model="demo", prompt=PROMPT, max_tokens=6, logprobs=number
    )
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:index])) for index in range(6)]
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert top[token] == logprob
        # As in vLLM, the chosen token is listed in addition to the most likely ones.
        assert len(top) <= number + 1


async def test_chats_return_logprobs_whole_and_streamed(openai):
    asked = {"model": "demo", "messages": TURNS, "max_tokens": 5, "logprobs": True}
    whole = await openai.chat.completions.create(**asked, top_logprobs=2)
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == (
        whole.choices[0].message.content
    )
    assert all(len(one.top_logprobs) == 2 for one in content)
    assert all(one.top_logprobs[0].token == one.token for one in content)
    seen = await chunks(openai.chat.completions.create(**asked, top_logprobs=2, stream=True))
    streamed = [one for chunk in seen for one in chunk.choices[0].logprobs.content]
    assert streamed == content
    chosen = await openai.chat.completions.create(**asked)
    chosen_content = chosen.choices[0].logprobs.content
    assert [(one.token, one.logprob, one.top_logprobs) for one in chosen_content] == [
        (one.token, one.logprob, []) for one in content
    ]
    none = await openai.chat.completions.create(**asked | {"logprobs": False}, top_logprobs=0)
    assert none.choices[0].logprobs is None


async def test_request_id_tenant_and_lane_reach_the_coordinator(openai, cluster):
    answer = await openai.completions.with_raw_response.create(
        model="demo",
        prompt="x",
        max_tokens=1,
        user="u",
        extra_headers={
            "x-request-id": "mine",
            "x-baton-tenant": "acme",
            "x-baton-lane": "batch",
        },
    )
    assert answer.headers["x-request-id"] == "mine"
    assert answer.parse().id == "mine"
    made = await openai.completions.create(
        model="demo", prompt="x", max_tokens=1, extra_body={"priority": 1}
    )
    async with AdminClient(cluster.address) as admin:
        by_id = {one.request_id: one for one in await admin.list_requests(include_ended=True)}
    assert (by_id["mine"].tenant, by_id["mine"].lane) == ("acme", 2)
    assert by_id[made.id].lane == 2
    assert by_id["mine"].route == by_id[made.id].route == "/v1/completions"


async def test_models(openai):
    models = [(one.id, one.object, one.parent) for one in (await openai.models.list()).data]
    adapters = [(name, "model", "demo") for name in ADAPTERS]
    assert models == [("demo", "model", None), *adapters]
    assert (await openai.models.retrieve("demo")).id == "demo"
    assert (await openai.models.retrieve("poet")).id == "poet"
    with pytest.raises(NotFoundError, match="serves 'demo' and 'clerk' and 'poet'"):
        await openai.models.retrieve("other/model")
    with pytest.raises(NotFoundError) as caught:
        await openai.completions.create(model="other", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


async def test_models_are_listed_with_a_slash_behind_the_path(gateway):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        listed, slashed = [await http.get(f"{gateway.url}/v1/models{end}") for end in ("", "/")]
    assert slashed.status_code == 200
    assert slashed.json() == listed.json()


async def test_an_adapter_is_chosen_by_the_model_field(openai, cluster):
    made = await openai.completions.create(model="poet", prompt=PROMPT, max_tokens=6)
    tokens = list(cluster.expected(PROMPT, 6, "poet"))
    assert made.model == "poet"
    assert made.choices[0].text == cluster.vocabulary.tokenizer.decode(tokens)
    assert tokens != list(cluster.expected(PROMPT, 6))


async def test_the_default_of_16_tokens_is_cut_to_the_context(openai):
    [model] = [one async for one in await openai.models.list() if one.id == "demo"]
    for room, num_tokens in ((20, 16), (3, 3)):
        prompt = [5] * (model.max_model_len - room)
        answer = await openai.completions.create(
            model="demo", prompt=prompt, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == num_tokens
        assert answer.choices[0].finish_reason == "length"


async def test_clients_recognize_the_error_of_a_prompt_beyond_the_context(openai):
    """LangChain reads the code; LiteLLM and Claude Code read the message."""
    context = (await openai.models.list()).data[0].max_model_len
    tokens = [7] * context
    # So long that it is refused before it is tokenized.
    turns = [{"role": "user", "content": "word " * 100 * context}]
    with pytest.raises(BadRequestError) as of_tokens:
        await openai.completions.create(model="demo", prompt=tokens)
    with pytest.raises(BadRequestError) as of_chat:
        await openai.chat.completions.create(model="demo", messages=turns)
    for refused, param in ((of_tokens, "prompt"), (of_chat, "messages")):
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", param)
        assert "prompt is too long: " in refused.value.message
        assert f"this model's maximum context length is {context} tokens" in refused.value.message
    assert f"prompt is too long: {context} tokens > {context - 1} max" in of_tokens.value.message


async def test_max_tokens_is_cut_to_the_context(openai):
    """Many clients always set max_tokens to the model's maximum length."""
    context = (await openai.models.list()).data[0].max_model_len
    prompt = [7] * (context - 3)
    answer = await openai.completions.create(
        model="demo", prompt=prompt, max_tokens=context, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("temperature", {"temperature": 3}),
        ("max_tokens", {"max_tokens": 100_000}),
        ("max_tokens", {"max_tokens": "5"}),
        ("top_p", {"top_p": 0}),
        ("stop", {"stop": 7}),
        ("stop[0]", {"stop": [""]}),
        ("n", {"n": 0}),
        ("n", {"n": 129}),
        ("logprobs", {"logprobs": 21}),
        ("logit_bias", {"logit_bias": {"a": 1}}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": ["a", 1]}),
        ("prompt", {"prompt": {}}),
        ("prompt", {"prompt": ""}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("stream_options.x", {"stream": True, "stream_options": {"x": 1}}),
        ("allowed_token_ids", {"allowed_token_ids": []}),
        ("echo", {"echo": True, "logprobs": 1, "stream": True}),
        ("max_tokens", {"max_tokens": 0}),
        ("prompt_logprobs", {"prompt_logprobs": -1}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 0, "stream": True}),
        ("request_id", {"request_id": "a\r\nset-cookie: b"}),
        ("session_id", {"session_id": "s" * 300}),
        ("add_special_tokens", {"add_special_tokens": False}),
        ("truncate_prompt_tokens", {"truncate_prompt_tokens": 4}),
        ("suffix", {"suffix": "end"}),
        ("best_of", {"best_of": 3}),
        ("temprature", {"temprature": 1}),
        ("response_format.type", {"response_format": {"type": "xml"}}),
        ("response_format", {"response_format": {"type": "json_schema"}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ],
    ids=str,
)
async def test_the_error_names_the_wrong_field(openai, field, body):
    with pytest.raises(BadRequestError) as caught:
        await openai.completions.create(model="demo", prompt="x", extra_body=body)
    assert caught.value.param == field
    assert caught.value.type == "invalid_request_error"
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {"messages": []}),
        ("messages[0].role", {"messages": [{"content": "x"}]}),
        ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
        (
            "messages[0].content",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        ),
        ("messages[0].name", {"messages": [{"role": "user", "content": "x", "name": 5}]}),
        ("tools", {"tools": [TOOL]}),
        ("tools", {"tools": [TOOL], "tool_choice": "auto"}),
        ("tools", {"tools": [TOOL], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": "sometimes"}),
        (
            "tool_choice",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        ),
        ("tools[0].function", {"tools": [{"type": "function"}]}),
        ("tools[0].type", {"tools": [{"type": "retrieval", "function": {"name": "f"}}]}),
        (
            "messages[0].tool_calls[0].function.name",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
        ),
        ("reasoning_effort", {"reasoning_effort": "some"}),
        ("echo", {"echo": True}),
        ("add_special_tokens", {"add_special_tokens": True}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_completion_tokens", {"max_completion_tokens": 0}),
        ("structured_outputs", {"structured_outputs": {"choice": []}}),
        ("prompt_cache_key", {"prompt_cache_key": "k" * 300}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"tools": []}}),
    ],
    ids=str,
)
async def test_the_error_names_the_wrong_field_of_a_chat(openai, field, body):
    with pytest.raises(BadRequestError) as caught:
        await openai.chat.completions.create(model="demo", messages=TURNS, extra_body=body)
    assert caught.value.param == field
    assert field in caught.value.message


async def test_fields_without_effect_are_accepted(openai):
    await openai.chat.completions.create(
        model="demo",
        messages=TURNS,
        max_tokens=1,
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        safety_identifier="s",
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_key="conversation",
        modalities=["text"],
        extra_body={
            "whatever": None,
            "functions": None,
            "echo": False,
            "add_special_tokens": False,
            "truncate_prompt_tokens": None,
            "return_token_ids": False,
        },
    )
    await openai.completions.create(
        model="demo", prompt="x", max_tokens=1, extra_body={"add_special_tokens": True}
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_frees_its_resources_at_once(
    openai, gateway, cluster, stream
):
    asked = asyncio.create_task(
        openai.completions.create(
            model="demo",
            prompt=PROMPT,
            max_tokens=2000,
            n=2,
            stream=stream,
            extra_body={"ignore_eos": True},
        )
    )
    if stream:
        answer = await asked
        await anext(aiter(answer))
        await answer.close()
    else:
        async with AdminClient(cluster.address) as admin:
            while not [one for one in await admin.list_requests() if one.completion_tokens]:
                await asyncio.sleep(0.02)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    await cluster.nothing_left(WAIT_S)
    async with AdminClient(cluster.address) as admin:
        ended = await admin.list_requests(include_ended=True)
    assert all(one.completion_tokens < 2000 for one in ended)
    families = await metrics(gateway)
    assert families["baton_http_requests"]["/v1/completions", "499"] == 1
    assert families["baton_http_requests_running"][()] == 0


async def test_a_stream_survives_a_restart_of_the_coordinator(tmp_path, model, start_gateway):
    with Cluster(tmp_path, model) as cluster:
        cluster.start_worker("prefill", "p1")
        cluster.start_worker("decode", "d1")
        await cluster.serving()
        async with start_gateway(cluster.address) as gateway, gateway.openai() as openai:
            stream = await openai.completions.create(
                model="demo",
                prompt=PROMPT,
                max_tokens=300,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            said = [await anext(stream) for _ in range(3)]
            await asyncio.to_thread(cluster.restart_coordinator)
            said += [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].text for chunk in said)
        assert text == decoded(cluster, PROMPT, 300)
        assert said[-1].choices[0].finish_reason == "length"


async def test_metrics_are_in_the_prometheus_format(openai, gateway):
    await openai.completions.create(model="demo", prompt=PROMPT, max_tokens=4)
    with pytest.raises(BadRequestError):
        await openai.completions.create(model="demo", prompt=PROMPT, temperature=9)
    families = await metrics(gateway)
    requests = families["baton_http_requests"]
    assert requests["/v1/completions", "200"] == requests["/v1/completions", "400"] == 1
    assert families["baton_http_connections"][()] >= 1
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(f"{gateway.url}/metrics")).text
    counts = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_count")
        and sample.labels == {"route": "/v1/completions", "lane": "interactive"}
    }
    assert counts["baton_http_time_to_first_token_seconds_count"] == 1
    assert counts["baton_http_request_duration_seconds_count"] == 1
    assert 1 <= counts["baton_http_inter_token_latency_seconds_count"] <= 3


async def metrics(gateway):
    """Values by family and the values of their labels."""
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(f"{gateway.url}/metrics")).text
    return {
        family.name: {
            tuple(value for _, value in sorted(sample.labels.items(), reverse=True)): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(text)
    }


async def test_health(gateway):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        assert (await http.get(f"{gateway.url}/health")).status_code == 200


async def test_ping_and_version_are_compatible_with_vllm(gateway):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        assert (await http.get(f"{gateway.url}/ping")).status_code == 200
        assert (await http.post(f"{gateway.url}/ping", json={})).status_code == 200
        assert (await http.get(f"{gateway.url}/version")).json() == {"version": __version__}
