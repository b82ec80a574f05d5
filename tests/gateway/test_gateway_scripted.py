"""A gateway in front of a coordinator whose events the test sends."""

import asyncio
import hashlib
import json
import os
import sys

import httpx2 as httpx
import pytest
from google.rpc import code_pb2
from openai import APIError, RateLimitError

from baton import gateway as gateway_package
from baton import models
from baton.cli.gateway import resume_timeout_s
from baton.client import errors
from baton.gateway import choices
from baton.runtime.config import parse
from baton.runtime.errors import AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable
from baton.v1 import common_pb2
from tests.client.scripted_inference import (
    ScriptedInference,
    accepted,
    advance_clock,
    delta,
    failed,
    finished,
    serving,
)

WAIT_S = 300.0


async def post(gateway, body, route="/v1/completions", **headers):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.post(f"{gateway.url}{route}", json=body, headers=headers)


def completions_request(body):
    """The bytes of a request, for tests that read and write the socket themselves."""
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + body


async def submitted(inference, gateway, body, route="/v1/completions", **headers):
    """Returns the request that the coordinator gets for a body; responds with one token."""
    answer = asyncio.create_task(post(gateway, body, route, **headers))
    connection = await inference.connection()
    submit = await connection.submitted()
    connection.send(
        accepted(submit.stream), delta(submit.stream, 0, [1], "a"), finished(submit.stream)
    )
    assert (await answer).status_code == 200, (await answer).text
    return submit.request


def events(response):
    found = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in found)
    return [line.removeprefix("data: ") for line in found]


async def test_all_fields_of_a_body_reach_the_coordinator(inference, scripted):
    body = {
        "model": "scripted",
        "prompt": [1, 2],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "min_tokens": 2,
        "seed": 11,
        "stop": "end",
        "stop_token_ids": [3],
        "bad_words": ["no"],
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logit_bias": {"5": -1},
        "logprobs": 2,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": {"type": "object"}},
        },
        "prompt_cache_key": "talk",
    }
    headers = {
        "x-baton-tenant": "acme",
        "x-baton-timeout-s": "500",
        "authorization": "Bearer key",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
    request = await submitted(inference, scripted, body, **headers)
    wanted = common_pb2.SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        min_tokens=2,
        seed=11,
        stop=["end"],
        stop_token_ids=[3],
        bad_words=["no"],
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        repetition_penalty=1.5,
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logit_bias={5: -1},
        logprobs=2,
        structured_output=common_pb2.StructuredOutput(json_schema='{"type": "object"}'),
    )
    assert request.sampling == wanted
    assert list(request.tokens.ids) == [1, 2]
    assert (request.tenant, request.session_id) == ("acme", "talk")
    assert (request.authorization, request.traceparent) == (
        "Bearer key",
        headers["traceparent"],
    )
    assert request.timeout.ToMilliseconds() == 500_000
    assert request.lane == common_pb2.LANE_INTERACTIVE


async def test_session_id_is_accepted_as_in_vllm(inference, scripted):
    request = await submitted(inference, scripted, {"prompt": "x", "session_id": "talk"})
    assert request.session_id == "talk"


@pytest.mark.parametrize(
    ("body", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "text"}}, None),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"json": {"type": "array"}}}, {"json_schema": '{"type": "array"}'}),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"grammar": "root ::= 'a'"}),
    ],
)
async def test_structured_outputs(inference, scripted, body, constraint):
    turns = [{"role": "user", "content": "hi"}]
    request = await submitted(
        inference, scripted, {"messages": turns, **body}, "/v1/chat/completions"
    )
    assert request.sampling.HasField("structured_output") is (constraint is not None)
    if constraint is not None:
        wanted = common_pb2.StructuredOutput(**constraint)
        assert request.sampling.structured_output == wanted


async def test_chat_template_kwargs_reach_the_coordinator(inference, scripted):
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request = await submitted(inference, scripted, body, "/v1/chat/completions")
    assert json.loads(request.chat.template_kwargs) == {"enable_thinking": False}


async def test_tools_and_earlier_calls_reach_the_chat_template(inference, scripted):
    """Also without parsers, which only new calls need: earlier calls are part of the chat."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [
            {"role": "user", "content": "hi", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "reasoning_effort": "none",
    }
    chat = (await submitted(inference, scripted, body, "/v1/chat/completions")).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [
        ("user", "hi"),
        ("assistant", ""),
        ("tool", "7"),
    ]
    assert [json.loads(turn.fields) for turn in chat.messages] == [
        {"name": "Ann"},
        {"tool_calls": [call], "reasoning": "so", "reasoning_content": "so"},
        {"tool_call_id": "c"},
    ]
    # Absent fields are null, as in vLLM.
    told = {"name": "f", "description": None, "parameters": None}
    assert json.loads(chat.tools) == [{"type": "function", "function": told}]
    assert json.loads(chat.template_kwargs) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
    }


@pytest.mark.parametrize(
    ("body", "headers", "lane"),
    [
        ({}, {}, common_pb2.LANE_INTERACTIVE),
        ({"priority": 0}, {}, common_pb2.LANE_INTERACTIVE),
        ({"priority": -3}, {}, common_pb2.LANE_INTERACTIVE),
        ({"priority": 1}, {}, common_pb2.LANE_BATCH),
        ({"priority": 1}, {"x-baton-lane": "interactive"}, common_pb2.LANE_INTERACTIVE),
        ({}, {"x-baton-lane": "batch"}, common_pb2.LANE_BATCH),
    ],
)
async def test_lanes(inference, scripted, body, headers, lane):
    request = await submitted(inference, scripted, {"prompt": "x", **body}, **headers)
    assert request.lane == lane


@pytest.mark.parametrize(
    ("body", "default", "max_tokens"),
    [({}, 16, 0), ({"max_tokens": None}, 16, 0), ({"max_tokens": 30}, 0, 30)],
)
async def test_completions_have_a_default_length(inference, scripted, body, default, max_tokens):
    request = await submitted(inference, scripted, {"prompt": "x", **body})
    assert request.default_max_tokens == default
    assert request.sampling.max_tokens == max_tokens


@pytest.mark.parametrize(
    "header",
    [
        {"x-baton-lane": "fast"},
        *({"x-baton-timeout-s": said} for said in ("soon", "-1", "1e300")),
    ],
)
async def test_a_wrong_header_is_named(scripted, header):
    answer = await post(scripted, {"prompt": "x"}, **header)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == next(iter(header))


async def test_each_choice_of_a_prompt_has_its_own_seed(inference, scripted):
    body = {"prompt": ["x", "y"], "n": 2, "seed": 7, "max_tokens": 1}
    answer = asyncio.create_task(post(scripted, body, **{"x-request-id": "many"}))
    connection = await inference.connection()
    seen = []
    for _ in range(4):
        submit = await connection.submitted()
        number, request = submit.stream, submit.request
        seen.append((request.request_id, request.text, request.sampling.seed))
        connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
    assert sorted(seen) == [
        ("many-0", "x", 7),
        ("many-1", "x", 8),
        ("many-2", "y", 7),
        ("many-3", "y", 8),
    ]
    assert (await answer).json()["id"] == "many"


async def test_each_delta_is_one_chunk_and_the_last_has_the_finish_reason(inference, scripted):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "stream": True}))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1, 2, 3], "h\u00e9\u2028"))
    connection.send(
        delta(number, 3, [4], ""), delta(number, 4, [5, 6], "\U0001f3c3"), finished(number)
    )
    *said, last = events(await answer)
    assert last == "[DONE]"
    choices = [json.loads(one)["choices"][0] for one in said]
    assert [one["text"] for one in choices] == ["h\u00e9\u2028", "", "\U0001f3c3"]
    assert [one["finish_reason"] for one in choices] == [None, None, "length"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shed_request_is_429_with_retry_after(inference, scripted, stream):
    async with scripted.openai() as openai:
        asked = asyncio.create_task(
            openai.completions.create(model="scripted", prompt="x", stream=stream)
        )
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(
            failed(number, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=2.3))
        )
        with pytest.raises(RateLimitError) as caught:
            await asked
    headers = caught.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2300")
    assert (caught.value.code, caught.value.type) == ("queue_full", "rate_limit_error")


async def test_the_openai_client_retries_by_itself(inference, scripted):
    async with scripted.openai(max_retries=1) as openai:
        asked = asyncio.create_task(openai.completions.create(model="scripted", prompt="x"))
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(
            failed(number, ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.01))
        )
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [1], "a"), finished(number))
        assert (await asked).choices[0].text == "a"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (code_pb2.INVALID_ARGUMENT, 400),
        (code_pb2.FAILED_PRECONDITION, 400),
        (code_pb2.UNAUTHENTICATED, 401),
        (code_pb2.PERMISSION_DENIED, 403),
        (code_pb2.NOT_FOUND, 404),
        (code_pb2.ALREADY_EXISTS, 409),
        (code_pb2.RESOURCE_EXHAUSTED, 429),
        (code_pb2.INTERNAL, 500),
        (code_pb2.DATA_LOSS, 500),
        (code_pb2.UNIMPLEMENTED, 501),
        (code_pb2.UNAVAILABLE, 503),
        (code_pb2.DEADLINE_EXCEEDED, 504),
    ],
    ids=lambda value: code_pb2.Code.Name(value) if value < 20 else "",
)
async def test_grpc_codes_become_http_statuses_before_the_first_token(
    inference, scripted, code, status
):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "stream": True}))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), failed(number, errors.make(code, "because")))
    response = await answer
    assert response.status_code == status
    assert response.json()["error"]["message"] == "because"
    assert ("retry-after" in response.headers) is (status == 503)
    # Without a retry delay the client should not retry.
    assert (response.headers.get("x-should-retry") == "false") is (status == 429)


@pytest.mark.parametrize(
    ("refusal", "param", "message"),
    [
        (InvalidArgument("tokens.ids[0]", 1, "must be 0"), "prompt", "prompt is 1; must be 0"),
        (
            InvalidArgument("sampling.min_tokens", 5, "at most sampling.max_tokens, which is 2"),
            "min_tokens",
            "min_tokens is 5; at most max_tokens, which is 2",
        ),
        (
            InvalidArgument("chat.messages[2].parts[1]", None, "must be a text or an image"),
            "messages[2].content[1]",
            "messages[2].content[1] is None; must be a text or an image",
        ),
        (
            InvalidArgument("chat.messages[2].parts", "9 parts", "at most 8"),
            "messages[2].content",
            "messages[2].content is '9 parts'; at most 8",
        ),
    ],
)
async def test_errors_use_the_http_names_of_fields(inference, scripted, refusal, param, message):
    answer = asyncio.create_task(post(scripted, {"prompt": [1]}))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(failed(number, refusal))
    error = (await answer).json()["error"]
    assert (error["param"], error["message"]) == (param, message)


async def test_no_coordinator_is_503(scripted, start_gateway):
    async with start_gateway("127.0.0.1:1", query_timeout_s=2.0) as gateway:
        for answer in (
            await post(gateway, {"prompt": "x"}),
            await get(gateway, "/health"),
            await get(gateway, "/v1/models"),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert "127.0.0.1:1" in answer.json()["error"]["message"]


async def get(gateway, route):
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        return await http.get(f"{gateway.url}{route}")


async def test_a_stream_that_fails_midway_ends_with_an_error(inference, scripted):
    async with scripted.openai() as openai:
        asked = asyncio.create_task(
            openai.completions.create(model="scripted", prompt="x", stream=True)
        )
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [1], "a"))
        stream = await asked
        assert (await anext(stream)).choices[0].text == "a"
        connection.send(failed(number, Unavailable("no worker is left")))
        with pytest.raises(APIError, match="no worker is left"):
            await anext(stream)


async def test_tokens_of_all_choices_arrive_at_once_and_before_an_error(inference, scripted):
    async with scripted.openai() as openai:
        asked = asyncio.create_task(
            openai.completions.create(model="scripted", prompt="x", stream=True, n=2)
        )
        connection = await inference.connection()
        numbers = [(await connection.submitted()).stream for _ in range(2)]
        connection.send(*(accepted(number, f"r{number}") for number in numbers))
        stream = None
        for offset in range(5):
            texts = {number: f"{number}-{offset}" for number in numbers}
            connection.send(*(delta(number, offset, [1], texts[number]) for number in numbers))
            # The next tokens are sent only when the client has these.
            stream = stream or await asked
            found = [(await anext(stream)).choices[0].text for _ in range(2)]
            assert set(found) == set(texts.values())
        connection.send(failed(numbers[0], Unavailable("no worker is left")))
        with pytest.raises(APIError, match="no worker is left"):
            await anext(stream)
        assert await connection.cancelled() == numbers[1]


async def test_the_error_event_is_followed_by_done(inference, scripted):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "stream": True}))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number), delta(number, 0, [1], "a"))
    connection.send(failed(number, Unavailable("no worker is left")))
    first, error, last = events(await answer)
    assert json.loads(first)["choices"][0]["text"] == "a"
    assert json.loads(error)["error"]["type"] == "service_unavailable_error"
    assert last == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_choice_fails_the_request_and_cancels_the_others(
    inference, scripted, stream
):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 3, "stream": stream}))
    connection = await inference.connection()
    numbers = [(await connection.submitted()).stream for _ in range(3)]
    connection.send(
        accepted(numbers[0], "a"), delta(numbers[0], 0, [1], "a"), accepted(numbers[1], "b")
    )
    refused = ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=1.0)
    connection.send(failed(numbers[2], refused))
    assert (await answer).status_code == 429
    assert {await connection.cancelled() for _ in range(2)} == set(numbers[:2])


@pytest.mark.parametrize("n", [1, 2])
async def test_a_header_id_that_is_in_use_is_replaced(inference, scripted, n):
    headers = {"x-request-id": "same"}
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": n}, **headers))
    connection = await inference.connection()
    for _ in range(n):
        number = (await connection.submitted()).stream
    connection.send(failed(number, AlreadyExists("request_id: is in use")))
    if n == 2:
        await connection.cancelled()
    ids = []
    for _ in range(n):
        submit = await connection.submitted()
        ids.append(submit.request.request_id)
        connection.send(accepted(submit.stream), finished(submit.stream))
    response = await answer
    assert response.status_code == 200
    own = response.json()["id"]
    assert own.startswith("cmpl-")
    assert ids == ([own] if n == 1 else [f"{own}-0", f"{own}-1"])
    assert response.headers["x-request-id"] == "same"


async def test_an_id_in_the_body_that_is_in_use_is_refused(inference, scripted):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "request_id": "same"}))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(failed(number, AlreadyExists("request_id: is in use")))
    assert (await answer).status_code == 409


@pytest.mark.parametrize(
    ("sent", "n"),
    [("host/abc-001", 1), ("a+b=", 1), ("caf\u00e9", 1), ("a" * 200, 1), ("a" * 127, 2)],
)
async def test_a_header_id_that_no_request_can_have_is_replaced(inference, scripted, sent, n):
    headers = {"x-request-id": sent.encode("latin-1")}
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": n}, **headers))
    connection = await inference.connection()
    for _ in range(n):
        submit = await connection.submitted()
        assert submit.request.request_id.startswith("cmpl-")
        connection.send(accepted(submit.stream), finished(submit.stream))
    response = await answer
    assert response.status_code == 200
    assert response.headers["x-request-id"] == sent


def over_limit(stream, reason="CREDENTIAL_CONCURRENCY", retry_after_s=WAIT_S):
    error = ResourceExhausted("over the limit", reason=reason, retry_after_s=retry_after_s)
    return failed(stream, error)


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_over_a_keys_limit_wait_for_the_others(inference, scripted, stream):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 3, "stream": stream}))
    connection = await inference.connection()
    numbers = [(await connection.submitted()).stream for _ in range(3)]
    connection.send(over_limit(numbers[0]), accepted(numbers[1]), over_limit(numbers[2]))
    connection.send(delta(numbers[1], 0, [1], "b"), finished(numbers[1]))
    for text in "ac":
        # They are submitted one at a time.
        again = await connection.submitted()
        assert connection.received.empty()
        connection.send(accepted(again.stream), delta(again.stream, 0, [1], text))
        connection.send(finished(again.stream))
    response = await answer
    assert response.status_code == 200
    bodies = [one for one in events(response) if one != "[DONE]"] if stream else [response.text]
    choices = [choice for body in bodies for choice in json.loads(body)["choices"]]
    assert {one["index"]: one["text"] for one in choices if one["text"]} == {0: "a", 1: "b", 2: "c"}


async def test_choices_over_a_tenants_rate_are_submitted_when_there_are_tokens(inference, scripted):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 2}))
    connection = await inference.connection()
    first, second = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(first), over_limit(second, "TENANT_RATE", 0.01))
    second = (await connection.submitted()).stream
    for number in (first, second):
        events = () if number == first else (accepted(number),)
        connection.send(*events, delta(number, 0, [1], "a"), finished(number))
    assert [one["text"] for one in (await answer).json()["choices"]] == ["a", "a"]


async def test_choices_without_room_for_any_are_refused(inference, scripted):
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 2}))
    connection = await inference.connection()
    for _ in range(2):
        connection.send(over_limit((await connection.submitted()).stream, retry_after_s=1.0))
    response = await answer
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_choices_do_not_wait_without_end_for_other_requests_of_the_caller(
    inference, scripted, monkeypatch
):
    monkeypatch.setattr(choices, "_MAX_REFUSALS", 2)
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 2}))
    connection = await inference.connection()
    first, second = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(first), over_limit(second), finished(first))
    for _ in range(2):
        second = (await connection.submitted()).stream
        connection.send(over_limit(second, retry_after_s=0.01))
    assert (await answer).status_code == 429


async def test_a_client_that_leaves_ends_choices_that_wait(inference, scripted):
    reader, writer = await asyncio.open_connection(*scripted.address)
    writer.write(completions_request(b'{"prompt": "x", "n": 2, "stream": true}'))
    connection = await inference.connection()
    first, second = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(first), over_limit(second, "TENANT_RATE"))
    connection.send(delta(first, 0, [1], "a"), finished(first))
    await reader.readuntil(b'"finish_reason":"length"')
    # The end of the first choice gives tokens back.
    connection.send(over_limit((await connection.submitted()).stream, "TENANT_RATE"))
    writer.close()
    async with asyncio.timeout(WAIT_S):
        while (await get(scripted, "/metrics")).text.count('code="499"') == 0:
            await asyncio.sleep(0.01)
    # If the gateway saw the client leave before the refusal, it has cancelled that try.
    left = [connection.received.get_nowait() for _ in range(connection.received.qsize())]
    assert not any(one.HasField("submit") for one in left)


async def test_the_timeout_of_a_request_holds_for_choices_that_wait(inference, scripted):
    headers = {"x-baton-timeout-s": "10"}
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 2}, **headers))
    connection = await inference.connection()
    first, second = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(first), finished(first), over_limit(second, "TENANT_RATE"))
    second = (await connection.submitted()).stream
    connection.send(over_limit(second, "TENANT_RATE"))
    while not answer.done():
        advance_clock(5)
        await asyncio.sleep(0.01)
    found = await answer
    assert found.status_code == 504
    assert "within the request's timeout of 10 s" in found.text


async def test_a_choice_asks_for_room_while_another_one_of_its_request_runs(inference, scripted):
    """Other requests of the same caller may have freed the room."""
    answer = asyncio.create_task(post(scripted, {"prompt": "x", "n": 2}))
    connection = await inference.connection()
    first, second = [(await connection.submitted()).stream for _ in range(2)]
    connection.send(accepted(first), over_limit(second, retry_after_s=0.01))
    second = (await connection.submitted()).stream
    connection.send(accepted(second), finished(second), finished(first))
    assert (await answer).status_code == 200


async def test_a_client_that_reads_nothing_is_disconnected_and_its_request_cancelled(
    inference, coordinator, start_gateway
):
    async with start_gateway(coordinator, write_timeout_s=0.2) as gateway:
        _reader, writer = await asyncio.open_connection(*gateway.address, limit=1024)
        body = b'{"prompt": "x", "stream": true, "max_tokens": 1000000}'
        writer.write(completions_request(body))
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number))
        text, offset = "x" * 100_000, 0
        cancelled = asyncio.create_task(connection.cancelled())
        while not cancelled.done():
            # More than the socket buffers hold.
            if offset < 200:
                connection.send(delta(number, offset, [1], text))
                offset += 1
            await asyncio.sleep(0.005)
        assert cancelled.result() == number
        connection.send(finished(number, common_pb2.FINISH_REASON_CANCELLED))
        writer.close()


async def test_a_client_that_reads_a_large_response_steadily_is_not_idle(
    inference, coordinator, start_gateway
):
    async with start_gateway(coordinator, write_timeout_s=60.0, keep_alive_s=1000) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address, limit=1024)
        body = b'{"prompt": "x", "max_tokens": 1000000}'
        writer.write(completions_request(body))
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        # More than the socket buffers hold.
        connection.send(accepted(number))
        for offset in range(300):
            connection.send(delta(number, offset, [1], "a" * 100_000))
        connection.send(finished(number))
        (answering,) = gateway.accepted
        transport = answering.transport
        async with asyncio.timeout(WAIT_S):
            while answering._reader_timer is None:
                await asyncio.sleep(0.01)
            for _ in range(3):
                unsent = transport.get_write_buffer_size()
                while transport.get_write_buffer_size() == unsent:
                    assert await reader.read(100_000)
                timer = answering._reader_timer
                advance_clock(60.0)
                while answering._reader_timer is timer and not transport.is_closing():
                    await asyncio.sleep(0.01)
                assert not transport.is_closing()
            advance_clock(60.0)
            while not transport.is_closing():
                await asyncio.sleep(0.01)
        writer.close()


async def test_a_slow_reader_gets_the_whole_response(inference, scripted):
    reader, writer = await asyncio.open_connection(*scripted.address, limit=1024)
    body = b'{"prompt": "x", "stream": true, "max_tokens": 1000000}'
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    num_deltas = 600
    for offset in range(num_deltas):
        connection.send(delta(number, offset, [1], f"{offset:>20000}"))
    connection.send(finished(number))
    await asyncio.sleep(0.1)
    received = await reader.read()
    while more := await reader.read():
        received += more
    writer.close()
    lines = [line for chunk in received.decode().split("\r\n") for line in chunk.split("\n\n")]
    said = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    text = "".join(json.loads(one)["choices"][0]["text"] for one in said)
    assert text.split() == [str(offset) for offset in range(num_deltas)]


async def test_the_end_of_a_choice_is_sent_before_other_choices_end(inference, scripted):
    reader, writer = await asyncio.open_connection(*scripted.address)
    body = b'{"prompt": "x", "stream": true, "n": 2}'
    writer.write(completions_request(body))
    connection = await inference.connection()
    first = (await connection.submitted()).stream
    second = (await connection.submitted()).stream
    connection.send(accepted(first), accepted(second))
    connection.send(delta(first, 0, [1], "a"), finished(first))
    await reader.readuntil(b'"finish_reason":"length"')
    connection.send(delta(second, 0, [1], "b"), finished(second))
    rest = await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.close()
    # The last chunk and the end of the response are one part of the response.
    *_, part, _, _, _ = rest.split(b"\r\n")
    assert part.startswith(b"data: {")
    assert part.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("num_waiting", [1, 2])
async def test_a_client_with_waiting_requests_that_leaves_cancels_the_running_one(
    inference, scripted, num_waiting
):
    _reader, writer = await asyncio.open_connection(*scripted.address)
    body = b'{"prompt": "x", "stream": true}'
    one = completions_request(body)
    writer.write((1 + num_waiting) * one)
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    writer.close()
    assert await connection.cancelled() == number
    connection.send(finished(number, common_pb2.FINISH_REASON_CANCELLED))


async def test_tokens_for_a_lost_connection_with_two_requests_harm_no_other(inference, scripted):
    reader, writer = await asyncio.open_connection(*scripted.address)
    body = b'{"prompt": "x", "stream": true}'
    # The second request waits for the end of the first response.
    writer.write(2 * completions_request(body))
    connection = await inference.connection()
    number = (await connection.submitted()).stream
    other = asyncio.create_task(post(scripted, {"prompt": "y", "stream": True}))
    other_number = (await connection.submitted()).stream
    connection.send(accepted(number, "r1"), accepted(other_number, "r2"))
    connection.send(delta(number, 0, [1], "a"), delta(other_number, 0, [1], "a"))
    await reader.readuntil(b"\n\n")
    writer.transport.abort()
    while scripted.accepted[0] in scripted.accepted[0].connections:
        await asyncio.sleep(0)
    for offset in range(1, 5):
        connection.send(delta(number, offset, [1], "b"), delta(other_number, offset, [1], "b"))
    connection.send(finished(number), finished(other_number))
    *said, last = events(await other)
    assert last == "[DONE]"
    assert "".join(json.loads(one)["choices"][0]["text"] for one in said) == "abbbb"


@pytest.mark.parametrize("ends", [True, False])
async def test_a_stop_drains_requests_until_the_timeout(
    inference, coordinator, start_gateway, caplog, ends
):
    caplog.set_level("INFO", logger="baton.gateway.server")
    drain_timeout_s = WAIT_S if ends else 0.2
    async with start_gateway(coordinator, drain_timeout_s=drain_timeout_s) as gateway:
        begun = asyncio.Event()

        async def read():
            found = []
            async with (
                httpx.AsyncClient(timeout=WAIT_S) as http,
                http.stream(
                    "POST", f"{gateway.url}/v1/completions", json={"prompt": "x", "stream": True}
                ) as response,
            ):
                async for line in response.aiter_lines():
                    begun.set()
                    if line:
                        found.append(line.removeprefix("data: "))
            return found

        reading = asyncio.create_task(read())
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [1], "a"))
        await begun.wait()
        gateway.stop.set()
        # The gateway accepts no new connections.
        while True:
            try:
                _, writer = await asyncio.open_connection(*gateway.address)
            except OSError:
                break
            writer.close()
            await asyncio.sleep(0.01)
        if ends:
            connection.send(delta(number, 1, [2], "b"), finished(number))
        said = await reading
        assert said[-1] == "[DONE]"
        if ends:
            assert json.loads(said[-2])["choices"][0]["finish_reason"] == "length"
        else:
            error = json.loads(said[-2])["error"]
            assert error["type"] == "service_unavailable_error"
            assert error["message"] == "the gateway stopped; its drain timeout of 0.2 s was over"
        assert await gateway.serving == 0
    waits = f"draining: waiting at most {drain_timeout_s:g} s for 1 request;"
    assert sum(line.startswith(waits) for line in caplog.messages) == 1


async def test_without_vllm_messages_are_refused_with_the_way_to_add_them(scripted, monkeypatch):
    monkeypatch.setitem(sys.modules, "baton.gateway.anthropic_messages", None)
    monkeypatch.delattr(gateway_package, "anthropic_messages", raising=False)
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    async with httpx.AsyncClient() as http:
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await http.post(f"{scripted.url}{route}", json=body)
            assert answer.status_code == 501
            told = answer.json()
            assert told["type"] == "error"
            assert told["error"]["type"] == "api_error"
            assert "install baton[vllm]" in told["error"]["message"]


async def test_headers_of_agents_name_the_session(scripted, inference):
    body = {"prompt": [1, 2], "max_tokens": 1}
    key = {"prompt_cache_key": "key"}
    sent = [
        ({}, {"session-id": "s4", "x-session-id": "s3"}, "s3"),
        ({}, {"session-id": "s4", "x-claude-code-session-id": "s1"}, "s1"),
        (key, {"x-session-affinity": "s2"}, "key"),
        # Longer than an ID may be.
        ({}, {"x-session-id": "a" * 300}, hashlib.sha256(b"a" * 300).hexdigest()),
    ]
    connection = None
    async with httpx.AsyncClient(base_url=scripted.url) as http:
        for more, headers, session in sent:
            route = "/v1/completions"
            asked = asyncio.create_task(http.post(route, json={**body, **more}, headers=headers))
            connection = connection or await inference.connection()
            submit = await connection.submitted()
            assert submit.request.session_id == session
            connection.send(accepted(submit.stream))
            connection.send(delta(submit.stream, 0, [1], "a"))
            connection.send(finished(submit.stream))
            assert (await asked).status_code == 200


class SlowModel(ScriptedInference):
    """A coordinator that tells its model, with a tokenizer, when the test lets it."""

    def __init__(self):
        super().__init__()
        self.asked, self.may_tell = asyncio.Event(), asyncio.Event()

    async def GetModel(self, request, context):
        self.asked.set()
        await self.may_tell.wait()
        return common_pb2.ModelDescription(
            name="scripted", tokenizer=os.path.join(os.path.dirname(models.__file__), "glossary")
        )


async def test_a_client_that_leaves_before_its_request_is_submitted_costs_nothing(start_gateway):
    inference = SlowModel()
    async with serving(inference) as (address, _), start_gateway(address) as gateway:
        # The gateway needs the model's tokenizer for these responses.
        body = {"prompt": "left", "return_token_ids": True}
        sent = json.dumps(body).encode()
        _, writer = await asyncio.open_connection(*gateway.address)
        writer.write(completions_request(sent))
        await asyncio.wait_for(inference.asked.wait(), WAIT_S)
        writer.close()
        async with asyncio.timeout(WAIT_S):
            while gateway.accepted[0] in gateway.accepted[0].connections:
                await asyncio.sleep(0.005)
        inference.may_tell.set()
        stays = asyncio.create_task(post(gateway, body | {"prompt": "stays"}))
        connection = await inference.connection()
        submit = await connection.submitted()
        assert submit.request.text == "stays"
        connection.send(accepted(submit.stream), finished(submit.stream))
        assert (await stays).status_code == 200
        async with httpx.AsyncClient(timeout=WAIT_S) as http:
            text = (await http.get(f"{gateway.url}/metrics")).text
        assert 'baton_http_requests_total{code="499",route="/v1/completions"} 1.0' in text
        assert 'baton_http_requests_total{code="200",route="/v1/completions"} 1.0' in text


# ---- Outages.


async def test_a_request_that_no_coordinator_accepts_again_ends(
    inference, coordinator, start_gateway
):
    body = {"model": "scripted", "prompt": [1, 2], "max_tokens": 9}
    async with (
        start_gateway(coordinator, resume_timeout_s=0.5) as gateway,
        httpx.AsyncClient(timeout=WAIT_S) as http,
    ):
        asked = asyncio.create_task(http.post(f"{gateway.url}/v1/completions", json=body))
        connection = await inference.connection()
        stream = (await connection.submitted()).stream
        connection.send(accepted(stream), delta(stream, 0, [1], "a"))
        connection.end()
        answer = await asked
    assert answer.status_code == 503
    message = answer.json()["error"]["message"]
    assert message.startswith("the request lost its session and could not be resumed within 0.5 s")


@pytest.mark.parametrize(("grace_s", "timeout_s"), [(5.0, 30.0), (120.0, 120.0)])
def test_requests_wait_for_a_coordinator_as_long_as_workers_keep_their_outputs(grace_s, timeout_s):
    config = parse({"coordinator": {"adoption_grace_s": grace_s}}, "test")
    assert resume_timeout_s(config.coordinator) == timeout_s
