"""The Messages API in front of a scripted model."""

import asyncio
import json

import httpx2 as httpx
import pytest

from tests.gateway.thinker import ANSWER, THINK
from tests.gateway.thinking_gateway import (
    LENGTH,
    MARKS,
    OSLO,
    STOP,
    TURNS,
    WAIT_S,
    WEATHER,
    call,
    gateway_fixture,
)

pytestmark = MARKS
gateway = gateway_fixture()
# Its tool parser takes the whole output as the arguments of a named tool.
json_gateway = gateway_fixture(tool_call_parser="pythonic")

TEXT = {"type": "text", "text": "a"}


def blocks(message):
    """The content of a message, without generated IDs and signatures."""
    left_out = {"id", "signature", "citations", "caller"}
    return [one.model_dump(exclude_none=True, exclude=left_out) for one in message.content]


def texts(turn):
    """The texts of a turn that the coordinator got."""
    return [part.text for part in turn.parts] or [turn.content]


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_have_text_thinking_and_tool_use(gateway, stream):
    off = {"thinking": {"type": "disabled"}, "stream": stream}
    request, found = await gateway.message("It is cold.", system="Be brief.", **off)
    assert blocks(found) == [{"type": "text", "text": "It is cold."}]
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "end_turn")
    assert found.usage.output_tokens > 0
    assert [one.role for one in request.chat.messages] == ["system", "user"]
    assert request.sampling.max_tokens == 100
    assert request.authorization == "Bearer key"
    assert request.route == "/v1/messages"
    assert found.id.startswith("msg-")
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    request, found = await gateway.message(text, tools=[WEATHER], stream=stream)
    assert blocks(found) == [
        {"type": "thinking", "thinking": "Oslo is north"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    ]
    assert found.stop_reason == "tool_use"
    assert found.content[1].id
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]
    _, found = await gateway.message("It is", reason=LENGTH, **off)
    assert found.stop_reason == "max_tokens"


async def named(gateway, text, reason=STOP, **body):
    """The message of a request that must call the tool."""
    choice = {"type": "tool", "name": "weather"}
    off = {"thinking": {"type": "disabled"}}
    body = {"tools": [WEATHER], "tool_choice": choice, **off, **body}
    _, found = await gateway.message(text, reason=reason, **body)
    return found


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "made"),
    [
        (OSLO, STOP, "tool_use", {"city": "Oslo"}),
        ('{"city": "Os', LENGTH, "max_tokens", {"city": "Os"}),
        ('{"city', LENGTH, "max_tokens", {}),
        ("[1, 2", LENGTH, "max_tokens", {}),
        ('{"city": "Oslo"}}', LENGTH, "max_tokens", {}),
        ('{"city": "Os', STOP, "tool_use", {}),
        ("cold", STOP, "tool_use", {}),
    ],
)
async def test_a_call_that_is_cut_off_has_an_object_as_input(
    json_gateway, text, reason, stop_reason, made
):
    found = await named(json_gateway, text, reason)
    assert found.stop_reason == stop_reason
    assert blocks(found) == [{"type": "tool_use", "name": "weather", "input": made}]


@pytest.mark.parametrize("stream", [False, True])
async def test_arguments_that_are_no_object_become_an_empty_input(gateway, json_gateway, stream):
    for text in ('"cold"', "[1]", "null"):
        found = await named(gateway, call(text), stream=stream)
        assert blocks(found) == [{"type": "tool_use", "name": "weather", "input": {}}]
    for text, made in (
        ("cold", {}),
        ("[1, 2", {}),
        (f"  {OSLO}", {"city": "Oslo"}),
    ):
        found = await named(json_gateway, text, stream=stream)
        assert blocks(found) == [{"type": "tool_use", "name": "weather", "input": made}]


async def test_an_answer_that_cannot_be_converted_is_an_error_in_anthropics_form(json_gateway):
    from anthropic import InternalServerError

    with pytest.raises(InternalServerError) as failed:
        # Deeper than Python's JSON reads.
        await named(json_gateway, '{"a":' * 2000 + "1" + "}" * 2000)
    assert failed.value.body["type"] == "error"
    assert failed.value.body["error"] == {"type": "api_error", "message": "internal error"}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(f"{json_gateway.url}/metrics")).text
    assert 'baton_http_requests_total{code="500",route="/v1/messages"} 1.0' in text


async def test_the_events_of_a_streamed_message_are_in_anthropics_order(gateway):
    async with gateway.anthropic() as client:
        body = {"model": "scripted", "max_tokens": 9, "messages": TURNS}
        thinking = {"type": "disabled"}
        asked = asyncio.create_task(client.messages.create(**body, thinking=thinking, stream=True))
        await gateway.answer("It is cold.", STOP)
        events = [event async for event in await asked]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events[2:-3]) == "It is cold."
    assert events[0].message.usage.output_tokens == 0
    assert events[-2].usage.output_tokens == len(events) - 5


PREFILL = {"role": "assistant", "content": "It is"}
TOOL_USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
THINKING = {"type": "thinking", "thinking": "Oslo is north", "signature": ""}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_continues_the_last_turn_of_the_assistant(gateway, stream):
    request, found = await gateway.message(" cold.", messages=[*TURNS, PREFILL], stream=stream)
    assert blocks(found) == [{"type": "text", "text": " cold."}]
    assert request.chat.continue_final_message
    assert not request.chat.add_generation_prompt
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told == [("user", TURNS[0]["content"]), ("assistant", "It is")]
    # A turn in blocks, with the reasoning before it, and a tool that the model may call.
    blocked = {"role": "assistant", "content": [THINKING, {"type": "text", "text": "I"}]}
    options = {"messages": [*TURNS, blocked], "tools": [WEATHER], "stream": stream}
    request, found = await gateway.message(f" look.{call(OSLO)}", **options)
    assert [one["type"] for one in blocks(found)] == ["text", "tool_use"]
    last = request.chat.messages[-1]
    assert (last.content, json.loads(last.fields)["reasoning"]) == ("I", "Oslo is north")
    request, _ = await gateway.message("It is cold.")
    assert not request.chat.continue_final_message
    assert not request.chat.HasField("add_generation_prompt")


def answering(content, **body):
    return {"messages": [*TURNS, {"role": "assistant", "content": content}], **body}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        *(
            ("messages[1].content", answering(content))
            for content in ("It is ", "It is\n", " ", "", [], [TEXT, {**TEXT, "text": "a "}])
        ),
        ("messages[1].content", answering([{**TEXT, "text": ""}])),
        ("messages[1].content", answering([TEXT, THINKING])),
        ("messages[1].content[0].type", answering([TOOL_USE])),
        ("messages[1].content[1].type", answering([TEXT, TOOL_USE])),
        ("messages[1].role", answering("It", thinking={"type": "enabled", "budget_tokens": 1024})),
        ("messages[1].role", answering("It", thinking={"type": "adaptive"})),
    ],
)
async def test_a_last_turn_that_cannot_be_continued_is_refused(gateway, field, body):
    async with gateway.anthropic() as client:
        from anthropic import BadRequestError as Refused

        with pytest.raises(Refused) as refused:
            await client.messages.create(model="scripted", max_tokens=2000, **body)
    told = refused.value.body["error"]
    assert told["type"] == "invalid_request_error"
    assert told["message"].startswith(f"{field} is ")
    content = body["messages"][1]["content"]
    if isinstance(content, str) and content != content.rstrip():
        # Anthropic's words.
        assert "final assistant content cannot end with trailing whitespace" in told["message"]


async def test_tool_results_and_the_session_reach_the_coordinator(gateway):
    turns = [
        *TURNS,
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "-3 C"}],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: turn=7"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    stop = ["END", "STOP", "A", "B", "C"]
    options = {"messages": turns, "system": system, "tools": [WEATHER], "stop_sequences": stop}
    options["metadata"] = {"user_id": "user-1"}
    request, _ = await gateway.message("Cold.", **options)
    told = [(one.role, one.content) for one in request.chat.messages]
    # The billing header changes with each turn and would spoil the prefix cache.
    assert told[0] == ("system", "Be brief.")
    assert told[-1] == ("tool", "-3 C")
    assert list(request.sampling.stop) == stop
    assert request.session_id == "user-1"
    headers = {"x-claude-code-session-id": "session-1"}
    request, _ = await gateway.message("Cold.", headers=headers, **options)
    assert request.session_id == "session-1"


async def test_system_texts_of_a_message_are_separate_lines(gateway):
    texts = ["You are an agent.", "x-anthropic-billing-header: turn=7", "Be brief.\n", "Be kind."]
    system = [{"type": "text", "text": one} for one in texts]
    reminder = {"role": "system", "content": [{"type": "text", "text": "It is May."}]}
    turns = [*TURNS, {"role": "assistant", "content": "Yes?"}, reminder, *TURNS]
    request, _ = await gateway.message("Cold.", system=system, messages=turns)
    told = [one.content for one in request.chat.messages if one.role == "system"]
    assert told == ["You are an agent.\nBe brief.\nBe kind.\nIt is May."]


async def test_tools_that_an_agent_loads_later_reach_the_coordinator(gateway):
    """Claude Code defers tools; its tool search answers with references to them."""
    called = {"type": "tool_use", "id": "t1", "name": "search", "input": {"query": "weather"}}
    reference = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    tools = [{"name": "search", "input_schema": {}}, {**WEATHER, "defer_loading": True}]
    request, found = await gateway.message(call(OSLO), messages=turns, tools=tools)
    assert [one.name for one in found.content] == ["weather"]
    told = [one["function"].get("defer_loading") for one in json.loads(request.chat.tools)]
    assert told == [None, True]
    told = [(one.role, one.content) for one in request.chat.messages if one.role == "tool"]
    assert told == [("tool", "<tool_reference>weather</tool_reference>")]


async def test_a_user_id_longer_than_the_id_of_a_session_is_shortened(gateway):
    sessions = []
    for last in ("a", "a", "b"):
        metadata = {"user_id": "u" * 500 + last}
        request, _ = await gateway.message("Cold.", metadata=metadata)
        sessions.append(request.session_id)
    assert sessions[0] == sessions[1] != sessions[2]


RESULT = {"type": "tool_result", "tool_use_id": "t1"}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("mcp_servers", {"mcp_servers": [{"type": "url", "name": "a", "url": "https://a"}]}),
        ("container", {"container": "c"}),
        ("tools[1].type", {"tools": [WEATHER, {"type": "web_search_20250305", "name": "s"}]}),
        ("output_config.format", {"output_format": 5}),
        ("thread", {"thread": {"type": "continue", "previous_message_id": "m"}}),
        (
            "messages[0].content[0].content[1].type",
            {"messages": [{"role": "user", "content": [{**RESULT, "content": [TEXT, DOCUMENT]}]}]},
        ),
        (
            "messages[1].content[1].type",
            {"messages": [*TURNS, {"role": "user", "content": [TEXT, DOCUMENT]}]},
        ),
        (
            "messages[0].content[0].type",
            {"messages": [{"role": "user", "content": [DOCUMENT]}, PREFILL]},
        ),
        *(
            (
                "messages[0].content[1].source",
                {"messages": [{"role": "user", "content": [TEXT, {"type": "image", **source}]}]},
            )
            for source in ({}, {"source": {}})
        ),
        *(
            ("messages[2].content", {"messages": [*TURNS, PREFILL, {"role": "user", **empty}]})
            for empty in (
                {"content": ""},
                {"content": []},
                {"content": [{**TEXT, "text": ""}]},
                {"content": [THINKING, {"type": "tool_reference", "tool_name": "weather"}]},
            )
        ),
        (
            "messages[0].content",
            {"messages": [{"role": "user", "content": []}, PREFILL, *TURNS]},
        ),
    ],
)
async def test_what_messages_cannot_honour_is_refused(gateway, field, body):
    body = {"model": "scripted", "max_tokens": 9, "messages": TURNS, **body}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/messages", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{field} is ")
    assert answer.json()["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_the_former_name_of_the_output_format_is_honoured(gateway):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    options = {"extra_body": {"output_format": {"type": "json_schema", "schema": schema}}}
    request, _ = await gateway.message('{"city": "Oslo"}', **options)
    assert json.loads(request.sampling.structured_output.json_schema) == schema


async def test_a_tool_with_a_schema_is_a_function_whatever_its_type(gateway):
    request, _ = await gateway.message("Cold.", tools=[{**WEATHER, "type": "function"}])
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


async def test_documents_in_earlier_results_are_left_out_with_a_word(gateway):
    called = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {**RESULT, "content": [TEXT, DOCUMENT]}
    turns = [
        *TURNS,
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
        {"role": "assistant", "content": "It is cold."},
        {"role": "user", "content": "And now?"},
    ]
    request, _ = await gateway.message("Warm.", messages=turns)
    (told,) = (turn.content for turn in request.chat.messages if turn.role == "tool")
    assert "[document left out]" in told


FOUND = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "a"}}


async def test_unknown_blocks_in_earlier_turns_are_left_out_with_a_word(gateway):
    """A client cannot take them back, for example when the conversation began with Claude."""
    source = {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]}
    turns = [
        {"role": "user", "content": [DOCUMENT, source, TEXT]},
        {"role": "assistant", "content": [SEARCH, FOUND, {"type": "text", "text": "It is cold."}]},
        {"role": "user", "content": "And now?"},
        # The model has paused its turn.
        {"role": "assistant", "content": [SEARCH, FOUND]},
        {"role": "user", "content": "And?"},
    ]
    request, _ = await gateway.message("Warm.", messages=turns)
    assert [(turn.role, texts(turn)) for turn in request.chat.messages] == [
        ("user", ["[document left out]", "[search_result left out]", "a"]),
        ("assistant", ["It is cold."]),
        ("user", ["And now?"]),
        ("assistant", ["[server_tool_use left out]"]),
        ("user", ["And?"]),
    ]
    async with gateway.anthropic() as client:
        counted = await client.messages.count_tokens(model="scripted", messages=turns)
    assert counted.input_tokens > 0


@pytest.mark.parametrize(
    "content",
    [
        [THINKING],
        [{"type": "redacted_thinking", "data": "a"}],
        [THINKING, SEARCH, FOUND],
        [{**TEXT, "text": ""}],
        [],
        "",
    ],
)
async def test_an_earlier_turn_of_the_assistant_without_a_text_is_not_empty(gateway, content):
    """Some chat templates refuse empty turns, and many expect user and assistant in turn."""
    turns = [*TURNS, {"role": "assistant", "content": content}, *TURNS]
    request, _ = await gateway.message("Cold.", messages=turns)
    question = ("user", TURNS[0]["content"])
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told == [question, ("assistant", "[no text]"), question]
    fields = request.chat.messages[1].fields
    reasoning = json.loads(fields or "{}").get("reasoning")
    assert reasoning == ("Oslo is north" if THINKING in list(content) else None)


async def test_a_turn_of_the_assistant_with_only_calls_has_no_text(gateway):
    turns = [
        *TURNS,
        {"role": "assistant", "content": [THINKING, TOOL_USE]},
        {"role": "user", "content": [RESULT, {**TEXT, "text": ""}]},
    ]
    request, _ = await gateway.message("Cold.", messages=turns)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told[1:] == [("assistant", ""), ("tool", "")]


async def test_a_client_with_threads_sends_the_whole_conversation_instead(gateway):
    """The tool runner of Anthropic's client asks the server to keep the conversation."""
    from anthropic import beta_async_tool

    async def weather(city: str) -> str:
        """Tells how cold it is."""
        return f"-3 C in {city}"

    body = {"model": "scripted", "max_tokens": 100, "messages": TURNS}
    async with gateway.anthropic() as client:
        runner = client.beta.messages.tool_runner(
            **body, tools=[beta_async_tool(weather)], thinking={"type": "disabled"}
        )
        asked = asyncio.create_task(runner.until_done())
        await gateway.answer(call(OSLO), STOP)
        request = await gateway.answer("It is cold.", STOP)
        found = await asked
    assert found.content[0].text == "It is cold."
    assert [turn.role for turn in request.chat.messages] == ["user", "assistant", "tool"]
    assert request.chat.messages[-1].content == "-3 C in Oslo"


async def test_errors_of_messages_have_anthropics_form(gateway):
    from anthropic import BadRequestError as Refused

    async with gateway.anthropic() as client:
        body = {"model": "scripted", "max_tokens": 9, "messages": TURNS}
        with pytest.raises(Refused) as refused:
            await client.messages.create(**{**body, "max_tokens": 0})
        assert refused.value.body["type"] == "error"
        told = refused.value.body["error"]
        assert told["type"] == "invalid_request_error"
        assert told["message"] == "max_tokens is 0; max_tokens must be positive"
        with pytest.raises(Refused, match=r"messages\[0\].role is 'robot'"):
            await client.messages.create(
                **{**body, "messages": [{"role": "robot", "content": "a"}]}
            )
        source = {"type": "url", "url": "http://a/b.png"}
        image = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        with pytest.raises(Refused, match="image_url"):
            await client.messages.create(**{**body, "messages": image})
        with pytest.raises(Refused) as refused:
            await client.messages.count_tokens(model="scripted", messages=[])
        assert refused.value.body["error"]["type"] == "invalid_request_error"


async def test_models_are_listed_in_anthropics_form_too(gateway):
    async with gateway.anthropic() as client:
        [listed] = [one async for one in client.models.list()]
        found = await client.models.retrieve("scripted")
    assert listed == found
    assert (found.id, found.type, found.display_name) == ("scripted", "model", "scripted")
    assert found.created_at.tzinfo is not None


async def test_tokens_of_messages_are_counted(gateway):
    async with gateway.anthropic() as client:
        counted = await client.messages.count_tokens(model="scripted", messages=TURNS)
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        body = {"model": "scripted", "messages": TURNS}
        answer = await http.post(f"{gateway.url}/tokenize", json=body)
    assert counted.input_tokens == answer.json()["count"] > 0


async def test_the_counted_prompt_is_the_prompt_of_the_message(gateway):
    """Without thinking, the prompt ends with an empty thought."""
    off = {"thinking": {"type": "disabled"}}
    async with gateway.anthropic() as client:
        body = {"model": "scripted", "messages": TURNS}
        plain = await client.messages.count_tokens(**body)
        counted = await client.messages.count_tokens(**body, **off)
    assert counted.input_tokens == plain.input_tokens + len(gateway.token_ids(THINK + ANSWER))
