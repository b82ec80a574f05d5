"""Tool calls and reasoning that vLLM's parsers find in the output of a scripted model."""

import asyncio
import base64
import json

import httpx2 as httpx
import pytest
from openai import BadRequestError, NotFoundError

from baton.runtime.config import HttpConfig
from baton.v1 import common_pb2
from tests.client.scripted_inference import accepted, delta, finished
from tests.gateway.thinker import ANSWER, THINK
from tests.gateway.thinking_gateway import (
    LENGTH,
    MARKS,
    OSLO,
    RESPONSES_TOOL,
    ROME,
    STOP,
    TOOL,
    TURNS,
    WAIT_S,
    WEATHER,
    call,
    gateway_fixture,
    joined,
    plain,
)

pytestmark = MARKS
gateway = gateway_fixture()

STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


@pytest.mark.parametrize(
    ("text", "content", "calls", "reason"),
    [
        ("It is cold.", "It is cold.", [], "stop"),
        (call(OSLO), "", [OSLO], "tool_calls"),
        ("I look. " + call(OSLO) + "\n" + call(ROME), "I look. ", [OSLO, ROME], "tool_calls"),
        ("Is 1 <tool 2?", "Is 1 <tool 2?", [], "stop"),
    ],
)
async def test_tool_calls_are_parsed(gateway, text, content, calls, reason):
    found, _ = await gateway.said(text, tools=[TOOL])
    made = [{"name": "weather", "arguments": one} for one in calls]
    assert found == [(content, "", made, reason)]


async def test_parallel_tool_calls_can_be_disabled(gateway):
    text = call(OSLO) + call(ROME)
    ((_, _, calls, _),), _ = await gateway.said(text, tools=[TOOL], parallel_tool_calls=False)
    assert calls == [{"name": "weather", "arguments": OSLO}]


async def test_the_first_chunk_of_a_streamed_call_has_empty_arguments(gateway):
    """As at OpenAI: clients add the arguments of later chunks to this text."""
    _, answer = await gateway.ask(call(OSLO) + call(ROME), tools=[TOOL], stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    made = [one["function"] for told in deltas for one in told.get("tool_calls", ())]
    begun = [one for one in made if "name" in one]
    assert begun == 2 * [{"name": "weather", "arguments": ""}]
    assert "".join(one["arguments"] for one in made) == OSLO + ROME


async def test_the_arguments_of_a_streamed_call_come_in_parts_with_a_text(gateway):
    """Neither the Messages API nor the Responses API begins a call with an empty part."""
    body = {"model": "scripted", "stream": True}
    async with gateway.anthropic() as client:
        of_messages = {"max_tokens": 99, "messages": TURNS, "tools": [WEATHER]}
        asked = asyncio.create_task(client.messages.create(**body, **of_messages))
        await gateway.answer(f"{THINK}{ANSWER}{call(OSLO)}", STOP)
        parts = [one.delta async for one in await asked if hasattr(one, "delta")]
    parts = [one.partial_json for one in parts if getattr(one, "type", "") == "input_json_delta"]
    assert all(parts)
    assert "".join(parts) == OSLO
    async with gateway.openai() as client:
        of_responses = {"input": "a", "tools": [RESPONSES_TOOL], "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, **of_responses))
        await gateway.answer(call(OSLO), STOP)
        events = [event async for event in await asked]
    kind = "response.function_call_arguments.delta"
    parts = [event.delta for event in events if event.type == kind]
    assert all(parts)
    assert "".join(parts) == OSLO


async def test_an_output_cut_off_in_a_call_has_reason_length(gateway):
    options = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    _, answer = await gateway.ask(call(OSLO)[:-20], reason=LENGTH, **options)
    (((content, _, calls, reason),), _) = joined(answer.text)
    assert (content, reason) == ("", "length")
    assert [one["name"] for one in calls] == ["weather"]


async def test_reasoning_is_separated_from_the_content(gateway):
    text = f"{THINK}Oslo is north{ANSWER}It is cold."
    found, usage = await gateway.said(text, think=True)
    assert found == [("It is cold.", "Oslo is north", [], "stop")]
    reasoned = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < reasoned < usage["completion_tokens"]
    # Reasoning followed by a call; each choice has its own parser.
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    found, _ = await gateway.said(text, think=True, tools=[TOOL], n=2)
    made = [{"name": "weather", "arguments": OSLO}]
    assert found == 2 * [("", "Oslo is north", made, "tool_calls")]


async def test_the_end_of_the_prompt_decides_whether_the_model_reasons(gateway):
    found, usage = await gateway.said("It is cold.", think=False)
    assert found == [("It is cold.", "", [], "stop")]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def begun(text):
    """The body of a chat whose answer has begun with this text."""
    turns = [*TURNS, {"role": "assistant", "content": text}]
    return {"messages": turns, "add_generation_prompt": False, "continue_final_message": True}


async def test_a_continued_answer_has_no_reasoning(gateway):
    """Although neither the prompt nor the output has an end of reasoning."""
    found, _ = await gateway.said("cold.", think=True, **begun("It is "))
    assert found == [("cold.", "", [], "stop")]
    found, _ = await gateway.said(f"look.{call(OSLO)}", think=True, tools=[TOOL], **begun("I "))
    made = [{"name": "weather", "arguments": OSLO}]
    assert found == [("look.", "", made, "tool_calls")]
    over = begun(f"{THINK}Oslo is north{ANSWER}It is ")
    assert (await gateway.said("cold.", think=True, **over))[0] == [("cold.", "", [], "stop")]
    request, _ = await gateway.ask("cold.", **begun("It is "))
    assert request.chat.continue_final_message
    assert request.chat.messages[-1].content == "It is "


async def test_begun_reasoning_is_continued(gateway):
    found, _ = await gateway.said(
        f" is north{ANSWER}It is cold.", think=True, **begun(f"{THINK}Oslo")
    )
    assert found == [("It is cold.", " is north", [], "stop")]


async def test_reasoning_can_be_hidden(gateway):
    text = f"{THINK}Oslo is north{ANSWER}It is cold."
    hidden = {"include_reasoning": False, "logprobs": True, "return_token_ids": True}
    for stream in (False, True):
        _, answer = await gateway.ask(text, think=True, stream=stream, **hidden)
        assert "north" not in answer.text
        assert "token_ids" not in answer.text
        assert "cold" in answer.text


async def test_tools_reach_the_coordinator_and_constrain_required_calls(gateway):
    request, _ = await gateway.ask("It is cold.", tools=[TOOL])
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]
    assert not request.sampling.HasField("structured_output")
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        request, answer = await gateway.ask(call(OSLO), tools=[STRICT], tool_choice=choice)
        tag = request.sampling.structured_output.structural_tag
        assert '"Oslo"' in tag
        assert "<tool_call>" in tag
        (found,) = answer.json()["choices"]
        # As in OpenAI's API, a call to a named tool has the finish reason "stop".
        reason = "tool_calls" if choice == "required" else "stop"
        assert plain(found) == ("", "", [{"name": "weather", "arguments": OSLO}], reason)
    request, answer = await gateway.ask(call(OSLO), tools=[TOOL], tool_choice="none")
    assert request.chat.tools
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_earlier_calls_may_lack_what_vllms_class_requires(gateway):
    functions = [
        {"name": "weather", "arguments": {"city": "Oslo"}},
        {"name": "weather"},
        {"name": "weather", "arguments": OSLO},
    ]
    calls = [{"type": "function", "function": one} for one in functions]
    turns = [
        *TURNS,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "-3 C"},
    ]
    request, _ = await gateway.ask("It is cold.", messages=turns, tools=[TOOL])
    # The chat template gets them unchanged.
    sent = json.loads(request.chat.messages[1].fields)["tool_calls"]
    assert [one["function"].get("arguments") for one in sent] == [{"city": "Oslo"}, None, OSLO]
    assert not any("id" in one for one in sent)


async def test_an_empty_list_of_tools_is_no_tools(gateway):
    request, answer = await gateway.ask("It is cold.", tools=[], tool_choice="none")
    assert answer.json()["choices"][0]["message"]["content"] == "It is cold."
    assert not request.chat.tools


async def test_structured_outputs_are_passed_on_unchanged(gateway):
    schema = {"type": "object"}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    request, _ = await gateway.ask("{}", response_format=wanted)
    assert json.loads(request.sampling.structured_output.json_schema) == schema
    for outputs in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"json": "{}"}):
        request, _ = await gateway.ask("a", structured_outputs=outputs)
        (kind,) = outputs
        assert kind in str(request.sampling.structured_output.WhichOneof("constraint"))


async def test_errors_of_the_parsers_name_the_field(gateway):
    error = await gateway.refused(tools=[{"type": "function", "function": {"name": ""}}])
    assert error["param"] == "tools[0].function.name"
    error = await gateway.refused(tools=[TOOL], tool_choice="required", top_logprobs=3)
    assert error["param"] == "top_logprobs"


PNG = b"\x89PNG\r\n\x1a\n and more"
PNG_BASE64 = base64.b64encode(PNG).decode()
PNG_URL = f"data:image/png;base64,{PNG_BASE64}"


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
async def test_images_reach_the_coordinator_as_files(gateway, api):
    if api == "chat":
        content = [image_part(PNG_URL), {"type": "text", "text": "What is it?"}]
        request, _ = await gateway.ask(OSLO, messages=[{"role": "user", "content": content}])
    elif api == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": PNG_BASE64}
        content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
        turns = [{"role": "user", "content": content}]
        request, _ = await gateway.message(OSLO, messages=turns)
    else:
        content = [
            {"type": "input_image", "image_url": PNG_URL, "detail": "auto"},
            {"type": "input_text", "text": "What is it?"},
        ]
        request, _ = await gateway.response(OSLO, input=[{"role": "user", "content": content}])
    (turn,) = request.chat.messages
    assert (turn.role, turn.content) == ("user", "")
    assert [(one.image, one.text) for one in turn.parts] == [(PNG, ""), (b"", "What is it?")]


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        (image_part("https://a/b.png"), "messages[0].content[1].image_url.url", "not fetched"),
        (image_part("data:image/png,aa"), "messages[0].content[1].image_url.url", "base64"),
        (image_part(f"{PNG_URL}!"), "messages[0].content[1].image_url.url", "is not base64"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content", "'input_audio'"),
    ],
)
async def test_refused_parts_of_a_chat_are_named(gateway, part, field, message):
    content = [{"type": "text", "text": "What?"}, part]
    async with gateway.openai() as client:
        with pytest.raises(BadRequestError) as refused:
            await client.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": content}]
            )
    assert refused.value.param == field
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/messages", {"messages": TURNS, "max_tokens": 9}), ("/v1/responses", {"input": "a"})],
)
async def test_a_client_that_stops_reading_is_disconnected_and_its_request_cancelled(
    gateway, path, body
):
    sent = json.dumps({"model": "scripted", "stream": True, **body}).encode()
    host, port = gateway.url.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(sent)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + sent)
    connection = await gateway.connection()
    number = (await connection.submitted()).stream
    connection.send(accepted(number))
    cancelled = asyncio.create_task(connection.cancelled())
    offset, (token, *_) = 0, gateway.token_ids("a")
    while not cancelled.done():
        # More than the buffers hold.
        if offset < 200:
            connection.send(delta(number, offset, [token], "a" * 100_000))
            offset += 1
        await asyncio.sleep(0.005)
    assert cancelled.result() == number
    connection.send(finished(number, common_pb2.FINISH_REASON_CANCELLED, offset))
    writer.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_body_within_the_limit_is_within_it_as_a_chat(gateway, path):
    """A character of this text takes 3 bytes of the body, and 6 where it is escaped."""
    text = "冷" * (HttpConfig().max_body_bytes // 5)
    turn = {"role": "user", "content": text}
    body = {"messages": [turn], "max_tokens": 9} if path == "/v1/messages" else {"input": [turn]}
    sent = json.dumps({"model": "scripted", **body}, ensure_ascii=False).encode()
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        headers = {"content-type": "application/json"}
        asked = asyncio.create_task(
            http.post(f"{gateway.url}{path}", content=sent, headers=headers)
        )
        answering = asyncio.create_task(gateway.answer("It is cold.", STOP))
        await asyncio.wait((asked, answering), return_when=asyncio.FIRST_COMPLETED)
        answering.cancel()
        assert (await asked).status_code == 200


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "none"}}),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 9, "thinking": {"type": "disabled"}}),
    ],
)
async def test_a_line_of_a_batch_may_be_a_response_or_a_message(gateway, endpoint, body):
    body = {"model": "scripted", **body}
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with gateway.openai() as client:
        file = await client.files.create(file=json.dumps(line).encode(), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        request = await gateway.answer("It is cold.", STOP)
        assert request.lane == common_pb2.LANE_BATCH
        assert request.authorization == "Bearer key"
        async with asyncio.timeout(WAIT_S):
            while batch.output_file_id is None:
                await asyncio.sleep(0.05)
                batch = await client.batches.retrieve(batch.id)
        assert (batch.usage.input_tokens > 0, batch.usage.output_tokens > 0) == (True, True)
        answer = json.loads((await client.files.content(batch.output_file_id)).text)["response"]
        if endpoint == "/v1/messages":
            assert answer["body"]["content"][0]["text"] == "It is cold."
        else:
            assert answer["body"]["output"][0]["content"][0]["text"] == "It is cold."
            # The memory for stored responses is for conversations.
            with pytest.raises(NotFoundError):
                await client.responses.retrieve(answer["body"]["id"])
