"""Bodies of the Responses and Messages API, as the gateway converts them to chats."""

import json
from types import SimpleNamespace

import pytest
from starlette.datastructures import Headers

from baton.gateway import body_parser
from baton.gateway.anthropic_route import Messages
from baton.gateway.error_responses import HttpError

responses = pytest.importorskip("baton.gateway.openai_responses")
messages = pytest.importorskip("baton.gateway.anthropic_messages")

NUM_WRONG = 2000


def as_chat(**body):
    """The chat of a request of the Responses API."""
    body = {"model": "m", "input": "a", **body}
    return responses.ResponseConversion(json.dumps(body).encode(), None, None, None).chat


def message_as_chat(*turns, **body):
    """The chat of a request of the Messages API."""
    body = {"model": "m", "max_tokens": 9, "messages": turns, **body}
    return messages.MessageConversion(json.dumps(body).encode()).chat


def counted(*turns, **body):
    """The body of /tokenize for a request that counts the tokens of a message."""
    return messages.tokenize_body(json.dumps({"model": "m", "messages": turns, **body}).encode())


def turn(*parts, role="user"):
    return {"role": role, "content": list(parts)}


@pytest.fixture
def num_problems(monkeypatch):
    """Numbers of problems of the refused values."""
    found, explain = [], body_parser.explain

    def counting(error, *rest):
        found.append(error.error_count())
        return explain(error, *rest)

    monkeypatch.setattr(body_parser, "explain", counting)
    return found


X = {"type": "x"}
TEXT = {"type": "text", "text": "How cold is it?"}
WRONG_RESPONSES = {
    "numbers": ({"input": [1] * NUM_WRONG}, "input[0]"),
    "unknown items": ({"input": [X] * NUM_WRONG}, "input[0]"),
    "numbers as parts": ({"input": [turn(*[1] * NUM_WRONG)]}, "input[0].content"),
    "unknown parts": ({"input": [turn(*[X] * NUM_WRONG)]}, "input[0].content"),
    "parts of an answer": (
        {"input": [turn(*[X] * NUM_WRONG, role="assistant")]},
        "input[0].content[0]",
    ),
    "parts of reasoning": (
        {"input": [{"type": "reasoning", "id": "r", "summary": [1] * NUM_WRONG}]},
        "input[0].summary[0]",
    ),
    "results of calls": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [X] * NUM_WRONG}]},
        "input[0]",
    ),
    "tools": ({"tools": [{"type": "function"}] * 1024}, "tools[0].name"),
    "biases": ({"logit_bias": {str(one): "x" for one in range(NUM_WRONG)}}, "logit_bias"),
    "metadata": ({"metadata": {str(one): one for one in range(NUM_WRONG)}}, "metadata"),
}


@pytest.mark.parametrize(("body", "param"), WRONG_RESPONSES.values(), ids=WRONG_RESPONSES)
def test_many_wrong_entries_of_a_response_have_few_problems(num_problems, body, param):
    with pytest.raises(HttpError) as refused:
        as_chat(**body)
    assert refused.value.status == 400
    assert refused.value.param.startswith(param)
    assert sum(num_problems) < NUM_WRONG / 4


WRONG_MESSAGES = {
    "numbers": ([1] * NUM_WRONG, {}, "messages[0]"),
    "unknown turns": ([{"role": "x"}] * NUM_WRONG, {}, "messages[0]"),
    "numbers as parts": ([turn(*[1] * NUM_WRONG)], {}, "messages[0].content"),
    "unknown parts": ([turn(*[X] * NUM_WRONG)], {}, "messages[0].content"),
    "tools": ([], {"tools": [{"name": "t"}] * 1024}, "tools[0]"),
    "system": ([], {"system": [1] * NUM_WRONG}, "system"),
}


@pytest.mark.parametrize("convert", [message_as_chat, counted])
@pytest.mark.parametrize(("turns", "body", "param"), WRONG_MESSAGES.values(), ids=WRONG_MESSAGES)
def test_many_wrong_entries_of_a_message_have_few_problems(
    num_problems, convert, turns, body, param
):
    with pytest.raises(HttpError) as refused:
        convert(*turns, **body)
    assert refused.value.status == 400
    assert refused.value.param.startswith(param)
    assert sum(num_problems) < NUM_WRONG / 4


def test_entries_behind_a_wrong_one_are_not_validated(monkeypatch):
    validated = []
    original = messages._MESSAGE

    def counting(sent):
        validated.append(sent["role"])
        return original.validate(sent)

    monkeypatch.setattr(messages, "_MESSAGE", SimpleNamespace(validate=counting))
    with pytest.raises(HttpError, match=r"messages\[1\]\.role is 'x'; "):
        message_as_chat(turn(), *[{"role": "x", "content": "a"}] * NUM_WRONG)
    assert validated == ["user", "x"]


FUNCTION = {"type": "function", "name": "f"}
SPACE = {"type": "namespace", "name": "s", "description": "d", "tools": [FUNCTION] * 8}


@pytest.mark.parametrize(
    ("convert", "param"),
    [
        (lambda: as_chat(input=[turn()] * 4097), "input"),
        (lambda: as_chat(input=[turn(*[1] * 5)] * 3300), "input"),
        (lambda: as_chat(tools=[FUNCTION] * 1025), "tools"),
        (lambda: as_chat(tools=[SPACE] * 129), "tools"),
        (lambda: message_as_chat(*[turn()] * 4097), "messages"),
        (lambda: message_as_chat(*[turn(*[1] * 5)] * 3300), "messages"),
        (lambda: message_as_chat(system=[1] * 16385), "system"),
        (lambda: message_as_chat(tools=[1] * 1025), "tools"),
    ],
)
def test_the_number_of_entries_is_limited(convert, param):
    with pytest.raises(HttpError, match=r"at most (4096|16384|1024)$") as refused:
        convert()
    assert refused.value.param == param


def test_unknown_fields_are_left_out():
    unknown = {f"unknown{one}": one for one in range(NUM_WRONG)}
    assert as_chat(**unknown)["messages"] == [{"role": "user", "content": "a"}]
    with pytest.raises(HttpError, match=r"^tools is 5; it has a wrong type"):
        as_chat(tools=5, **unknown)


def test_an_answer_needs_no_type():
    """The AI SDK sends earlier answers without one."""
    answer = turn({"type": "output_text", "text": "Cold."}, role="assistant")
    assert as_chat(input=[answer, turn({"type": "input_text", "text": "And?"})])["messages"] == [
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": [{"type": "text", "text": "And?"}]},
    ]


def test_a_null_within_a_tools_schema_is_kept():
    schema = {"type": "object", "properties": {"a": {"const": None}, "b": {"default": None}}}
    (tool,) = as_chat(tools=[{"type": "function", "name": "f", "parameters": schema}])["tools"]
    assert tool == {"type": "function", "function": {"name": "f", "parameters": schema}}


def test_images_of_parallel_results_come_behind_the_results():
    def result(call_id, *parts):
        return {"type": "tool_result", "tool_use_id": call_id, "content": list(parts)}

    uses = [{"type": "tool_use", "id": one, "name": "look", "input": {}} for one in "abc"]
    text, source = {"type": "text", "text": "Seen."}, {"type": "base64", "media_type": "image/png"}
    first, second = ({"type": "image", "source": {**source, "data": one}} for one in ("1", "2"))
    results = [result("a", text, first), result("b", second), result("c", text)]
    chat = message_as_chat(turn(text), turn(*uses, role="assistant"), turn(*results, text))
    told = chat["messages"][2:]
    assert [(one["role"], one.get("tool_call_id")) for one in told] == [
        ("tool", "a"),
        ("tool", "b"),
        ("tool", "c"),
        ("user", None),
        ("user", None),
        ("user", None),
    ]
    urls = [part["image_url"]["url"] for one in told[3:5] for part in one["content"]]
    assert urls == ["data:image/png;base64,1", "data:image/png;base64,2"]
    assert told[5]["content"] == "Seen."


def test_calls_of_tools_that_are_left_out_are_left_out():
    """A conversation that began at OpenAI has them."""
    search = {"type": "web_search_call", "id": "w", "status": "completed", "action": {}}
    shell = {"type": "local_shell_call", "id": "l", "call_id": "c1", "action": {}}
    shell_result = {"type": "function_call_output", "call_id": "c1", "output": "left out"}
    listed = {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []}
    newer = {"type": "brand_new_call", "id": "n", "call_id": "c2"}
    newer_result = {"type": "brand_new_call_output", "call_id": "c2", "output": "left out"}
    kept = {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"}
    kept_result = {"type": "function_call_output", "call_id": "c3", "output": "kept"}
    others = [search, shell, shell_result, listed, newer, newer_result]
    told = as_chat(input=[turn(), *others, kept, kept_result])["messages"]
    assert [one["role"] for one in told] == ["user", "assistant", "tool"]
    assert told[2]["content"] == "kept"
    with pytest.raises(HttpError, match=r"^input\[1\]\.type is 'x'; "):
        as_chat(input=[search, X])


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "text", "text": 5}, "text"),
        ({"type": "text", "text": None}, "text"),
        ({"type": "image", "source": 5}, "source"),
        ({"type": "image", "source": None}, "source"),
    ],
)
def test_a_part_of_a_result_with_a_wrong_type_is_refused(part, field):
    result = {"type": "tool_result", "tool_use_id": "a", "content": [part]}
    with pytest.raises(HttpError) as refused:
        message_as_chat(turn(result), turn({"type": "text", "text": "And?"}))
    assert refused.value.param == f"messages[0].content[0].content[0].{field}"


@pytest.mark.parametrize(("limit", "is_refused"), [(50, True), (10_000, False)])
async def test_a_converted_chat_has_the_limit_of_a_body(limit, is_refused):
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": [turn(TEXT)]}).encode()
    if is_refused:
        with pytest.raises(HttpError) as refused:
            await Messages(limit).read(body, Headers())
        assert (refused.value.status, refused.value.code) == (413, "body_too_large")
    else:
        assert (await Messages(limit).read(body, Headers())).chat.max_tokens == 9
