"""The Responses API in front of a scripted model."""

import asyncio
import json

import httpx2 as httpx
import pytest
from openai import BadRequestError, NotFoundError

from baton.runtime.errors import Unavailable
from tests.client.scripted_inference import accepted, delta, failed
from tests.gateway.thinker import ANSWER, THINK
from tests.gateway.thinking_gateway import (
    LENGTH,
    MARKS,
    OSLO,
    RESPONSES_TOOL,
    STOP,
    TURNS,
    WAIT_S,
    call,
    gateway_fixture,
)

pytestmark = MARKS
gateway = gateway_fixture()


def items(response):
    """The output of a response, without generated IDs."""
    found = []
    for one in response.output:
        if one.type == "function_call":
            assert one.call_id
            found.append((one.name, json.loads(one.arguments)))
        else:
            found.append((one.type, "".join(part.text for part in one.content)))
    return found


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_have_text_reasoning_and_function_calls(gateway, stream):
    off = {"reasoning": {"effort": "none"}, "stream": stream}
    request, found = await gateway.response("It is cold.", instructions="Be brief.", **off)
    assert items(found) == [("message", "It is cold.")]
    assert (found.status, found.object) == ("completed", "response")
    assert found.usage.output_tokens > 0
    assert [one.role for one in request.chat.messages] == ["system", "user"]
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    options = {"tools": [RESPONSES_TOOL], "max_output_tokens": 50, "stream": stream}
    request, found = await gateway.response(text, **options)
    assert items(found) == [("reasoning", "Oslo is north"), ("weather", {"city": "Oslo"})]
    assert request.sampling.max_tokens == 50
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_was_cut_off_is_incomplete(gateway, stream):
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=stream))
        await gateway.answer("It is", LENGTH)
        found = await asked
        if stream:
            *_, last = [event async for event in found]
            assert last.type == "response.incomplete"
            found = last.response
    assert found.status == "incomplete"
    assert found.incomplete_details.reason == "max_output_tokens"
    assert items(found) == [("message", "It is")]
    assert found.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "reason", "statuses"),
    [
        ("It is cold.", STOP, {"message": "completed"}),
        ("It is", LENGTH, {"message": "incomplete"}),
        (f"I look. {call(OSLO)}", STOP, {"message": "completed", "function_call": "completed"}),
        (
            f"I look. {call(OSLO)}",
            LENGTH,
            {"message": "completed", "function_call": "incomplete"},
        ),
    ],
)
async def test_the_last_item_of_a_response_that_was_cut_off_is_incomplete(
    gateway, stream, text, reason, statuses
):
    """Items before it are whole."""
    off = {"reasoning": {"effort": "none"}, "tools": [RESPONSES_TOOL]}
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", **off}
        asked = asyncio.create_task(client.responses.create(**body, stream=stream))
        await gateway.answer(text, reason)
        found = await asked
        if stream:
            events = [event async for event in found]
            done = [one.item for one in events if one.type == "response.output_item.done"]
            assert {one.type: one.status for one in done} == statuses
            assert [one.sequence_number for one in events] == list(range(len(events)))
            found = events[-1].response
        assert {one.type: one.status for one in found.output} == statuses
        # The client sends the items back.
        again = [one.model_dump(mode="json") for one in found.output]
        asked = asyncio.create_task(client.responses.create(**body | {"input": again}))
        await gateway.answer("Cold.", STOP)
        await asked


async def test_the_events_of_a_streamed_response_are_in_openais_order(gateway):
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=True))
        await gateway.answer("It is cold.", STOP)
        events = [event async for event in await asked]
    kinds = [event.type.removeprefix("response.") for event in events]
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[:4] == opened
    assert set(kinds[4:-4]) == {"output_text.delta"}
    closed = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == closed
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.output[0].id == events[2].item.id


async def test_a_streamed_response_that_fails_ends_with_the_failed_response(gateway):
    """Codex reads only the last event, and OpenAI's client needs its response."""
    async with gateway.openai() as client:
        body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
        asked = asyncio.create_task(client.responses.create(**body, stream=True))
        connection = await gateway.connection()
        number = (await connection.submitted()).stream
        (token,) = gateway.token_ids("a")
        connection.send(accepted(number), delta(number, 0, [token], "It is"))
        stream = await asked
        connection.send(failed(number, Unavailable("no worker is left")))
        events = [event async for event in stream]
    *_, error, last = events
    assert (error.type, error.code, error.message) == ("error", "unavailable", "no worker is left")
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "no worker is left"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_stored_response_is_continued_read_and_deleted_by_its_caller_only(gateway):
    off = {"reasoning": {"effort": "none"}}
    first, one = await gateway.response("It is cold.", **off)
    second, two = await gateway.response("-3 C", previous_response_id=one.id, input="How?", **off)
    told = [(turn.role, turn.content) for turn in second.chat.messages]
    assert told == [
        ("user", "How cold is it in Oslo?"),
        ("assistant", "It is cold."),
        ("user", "How?"),
    ]
    # The conversation's requests find their KV cache again.
    assert first.session_id == second.session_id == one.id
    async with gateway.openai() as client, gateway.openai("another") as other:
        assert (await client.responses.retrieve(two.id)).output_text == "-3 C"
        with pytest.raises(NotFoundError):
            await other.responses.retrieve(two.id)
        body = {"model": "scripted", "input": "a", "previous_response_id": two.id}
        with pytest.raises(BadRequestError, match="is not stored here"):
            await other.responses.create(**body)
        await client.responses.delete(two.id)
        with pytest.raises(NotFoundError, match="is not stored here"):
            await client.responses.retrieve(two.id)
        _, gone = await gateway.response("No.", store=False, **off)
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(gone.id)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_item_of_a_stored_response_can_be_referred_to(gateway, stream):
    """Vercel's AI SDK sends its earlier answers in this way."""
    text = f"{THINK}Oslo is north{ANSWER}{call(OSLO)}"
    _, one = await gateway.response(text, tools=[RESPONSES_TOOL], stream=stream)
    references = [{"type": "item_reference", "id": item.id} for item in one.output]
    output = {"type": "function_call_output", "call_id": one.output[-1].call_id, "output": "-3 C"}
    turns = [*TURNS, *references, output]
    request, _ = await gateway.response("Cold.", input=turns)
    assert [turn.role for turn in request.chat.messages] == ["user", "assistant", "tool"]
    told = json.loads(request.chat.messages[1].fields)
    assert told["reasoning"] == "Oslo is north"
    assert told["tool_calls"][0]["function"] == {"name": "weather", "arguments": OSLO}
    with pytest.raises(BadRequestError, match="no stored response has this item") as refused:
        await gateway.response("Cold.", input=turns, key="another")
    assert refused.value.param == "input[1].id"


async def test_only_instructions_are_not_carried_over_to_the_next_response(gateway):
    def said(role, text):
        return {"role": role, "content": text}

    off = {"reasoning": {"effort": "none"}}
    turns = [said("developer", "Use the tools."), said("user", "Oslo?")]
    _, one = await gateway.response("Cold.", instructions="Be brief.", input=turns, **off)
    turns = [said("system", "It is May."), said("user", "Rome?")]
    then = {"previous_response_id": one.id, "input": turns, "instructions": "Be polite."}
    request, two = await gateway.response("Warm.", **then, **off)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    first = [("user", "Oslo?"), ("assistant", "Cold.")]
    second = [("system", "It is May."), ("user", "Rome?")]
    assert told == [("system", "Be polite.\nUse the tools."), *first, *second]
    request, _ = await gateway.response("Bye.", previous_response_id=two.id, input="Thanks.", **off)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    last = [("assistant", "Warm."), ("user", "Thanks.")]
    assert told == [("system", "Use the tools."), *first, *second, *last]


async def test_callers_with_x_api_key_do_not_see_the_responses_of_others(gateway):
    body = {"model": "scripted", "input": "a", "reasoning": {"effort": "none"}}
    mine = {"x-api-key": "mine"}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
        asked = asyncio.create_task(http.post("/v1/responses", json=body, headers=mine))
        request = await gateway.answer("It is cold.", STOP)
        assert request.authorization == "Bearer mine"
        found = (await asked).json()["id"]
        for stranger in ({"x-api-key": "another"}, {}):
            for method in ("GET", "DELETE"):
                refused = await http.request(method, f"/v1/responses/{found}", headers=stranger)
                assert refused.status_code == 404
            continued = body | {"previous_response_id": found}
            refused = await http.post("/v1/responses", json=continued, headers=stranger)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "previous_response_not_found"
        for own in (mine, {"authorization": "Bearer mine"}):
            assert (await http.get(f"/v1/responses/{found}", headers=own)).status_code == 200


async def test_a_stored_response_is_not_streamed(gateway):
    _, stored = await gateway.response("It is cold.", input="a")
    async with httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http:
        headers = {"authorization": "Bearer key"}
        for value, status in (("true", 400), ("false", 200)):
            url = f"/v1/responses/{stored.id}?stream={value}"
            found = await http.get(url, headers=headers)
            assert found.status_code == status
            assert (status == 200) or found.json()["error"]["param"] == "stream"


async def test_an_agents_turns_reach_the_coordinator_as_a_chat(gateway):
    """Codex sends instructions, developer texts, text parts, calls and their outputs."""

    def said(role, kind, text):
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    turns = [
        said("developer", "input_text", "Use the tools."),
        said("user", "input_text", "How cold is it in Oslo?"),
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": OSLO},
        {"type": "function_call_output", "call_id": "c1", "output": "-3 C"},
        said("assistant", "output_text", "It is cold."),
        said("user", "input_text", "Thanks."),
    ]
    options = {"instructions": "Be brief.", "tools": [RESPONSES_TOOL], "store": False}
    options["include"] = ["reasoning.encrypted_content"]
    request, _ = await gateway.response("Bye.", input=turns, prompt_cache_key="s", **options)
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert told == [
        ("system", "Be brief.\nUse the tools."),
        ("user", "How cold is it in Oslo?"),
        ("assistant", ""),
        ("tool", "-3 C"),
        ("assistant", "It is cold."),
        ("user", "Thanks."),
    ]
    assert request.session_id == "s"


async def test_all_parts_of_earlier_answers_reach_the_coordinator(gateway):
    def answered(*parts):
        return {"type": "message", "role": "assistant", "content": list(parts)}

    text, refusal = {"type": "output_text", "text": "Cold."}, {"type": "refusal", "refusal": "No."}
    turns = [*TURNS, answered(text, {**text, "text": " -3 C."}), *TURNS, answered(refusal)]
    request, _ = await gateway.response("Bye.", input=[*turns, *TURNS])
    told = [turn.content for turn in request.chat.messages if turn.role == "assistant"]
    assert told == ["Cold. -3 C.", "No."]


async def test_reasoning_that_only_openai_can_read_is_left_out(gateway):
    """Codex sends it when a conversation goes on with another model."""
    sealed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAA"}
    summary = [{"type": "summary_text", "text": "Look north."}]
    call_item = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": OSLO}
    result = {"type": "function_call_output", "call_id": "c", "output": "-3 C"}
    turns = [*TURNS, sealed, call_item, result, {**sealed, "summary": summary}, call_item, result]
    request, _ = await gateway.response("Bye.", input=turns)
    told = [turn for turn in request.chat.messages if turn.role == "assistant"]
    assert [json.loads(turn.fields).get("reasoning") for turn in told] == [None, "Look north."]


async def test_developer_texts_within_a_conversation_keep_their_role(gateway):
    """The coordinator knows whether the chat template takes them."""
    later = {"role": "developer", "content": "Ask first."}
    turns = [{"role": "developer", "content": "Use the tools."}, *TURNS, later, *TURNS]
    request, _ = await gateway.response("Bye.", input=turns, instructions="Be brief.")
    told = [(turn.role, turn.content) for turn in request.chat.messages]
    assert [role for role, _ in told] == ["system", "user", "developer", "user"]
    assert (told[0][1], told[2][1]) == ("Be brief.\nUse the tools.", "Ask first.")


async def test_a_tool_choice_that_chats_do_not_have_is_refused(gateway):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}
    async with gateway.openai() as client:
        for tool, choice, param in (
            (RESPONSES_TOOL, allowed, "tool_choice.type"),
            ({"type": "web_search"}, "required", "tool_choice"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await client.responses.create(
                    model="scripted", input="a", tools=[tool], tool_choice=choice
                )
            assert refused.value.param == param


async def test_tools_and_details_of_openai_are_left_out(gateway):
    """Also those that are newer than vLLM's class of a request."""
    tools = [RESPONSES_TOOL, {"type": "web_search"}, {"type": "brand_new", "what": 1}]
    include = ["web_search_call.action.sources", "reasoning.encrypted_content"]
    request, found = await gateway.response(call(OSLO), tools=tools, include=include)
    assert items(found) == [("weather", {"city": "Oslo"})]
    assert [one["function"]["name"] for one in json.loads(request.chat.tools)] == ["weather"]


async def test_null_is_a_field_that_is_not_set(gateway):
    unset = ("tools", "tool_choice", "service_tier", "include", "store", "truncation", "stop")
    reasoning = {"type": "reasoning", "id": None, "summary": [], "content": None, "status": None}
    turns = [*TURNS, reasoning, {"role": "user", "content": "And?", "type": None}]
    request, _ = await gateway.response("Bye.", input=turns, extra_body=dict.fromkeys(unset))
    assert request.chat.messages[-1].content == "And?"
    unset = ("system", "tools", "tool_choice", "thinking", "stop_sequences", "service_tier")
    request, _ = await gateway.message("Bye.", **dict.fromkeys(unset))
    assert not request.chat.tools


async def test_vllms_fields_of_responses_reach_the_coordinator(gateway):
    extra = {
        "structured_outputs": {"choice": ["yes", "no"]},
        "session_id": "s",
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "include_reasoning": False,
    }
    request, found = await gateway.response(f"{THINK}Hm.{ANSWER}yes", extra_body=extra)
    assert items(found) == [("message", "yes")]
    assert request.session_id == "s"
    sampling = request.sampling
    assert list(sampling.structured_output.choice.values) == ["yes", "no"]
    assert (sampling.skip_special_tokens, sampling.include_stop_str_in_output) == (False, True)


async def test_errors_of_responses_have_openais_form(gateway):
    async with gateway.openai() as client:
        with pytest.raises(BadRequestError, match="background is True; must be false") as refused:
            await client.responses.create(model="scripted", input="a", background=True)
        assert refused.value.type == "invalid_request_error"
        with pytest.raises(BadRequestError, match="max_output_tokens") as refused:
            await client.responses.create(model="scripted", input="a", max_output_tokens="x")
        assert refused.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", 5, "input"),
        ("input", [], "input"),
        ("input", [5], "input[0]"),
        ("input", [{"role": "robot", "content": "a"}], "input[0].role"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_text", "text": 5}]}],
            "input[0].content[0].text",
        ),
        ("input", [{"type": "reasoning", "id": "r", "summary": [1]}], "input[0].summary[0]"),
        ("tools", 5, "tools"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("tools", [{"name": "f"}], "tools[0].type"),
        ("tools", [{"type": "custom", "name": "f", "format": {"type": "grammar"}}], "tools"),
        ("text", {"format": {"type": "x"}}, "text.format.type"),
        ("reasoning", {"effort": 5}, "reasoning.effort"),
        ("background", True, "background"),
        ("cache_salt", "salt", "cache_salt"),
        ("conversation", "conv_1", "conversation"),
        ("include", ["message.output_text.logprobs"], "include"),
        ("top_logprobs", 2, "top_logprobs"),
        ("truncation", "auto", "truncation"),
        ("tool_choice", {"type": "web_search_preview"}, "tool_choice"),
    ],
)
async def test_an_error_of_responses_names_the_path_of_the_field(gateway, field, value, param):
    body = {"model": "scripted", "input": "a", field: value}
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        answer = await http.post(f"{gateway.url}/v1/responses", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)
