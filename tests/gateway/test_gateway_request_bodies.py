"""Every body becomes requests or an error that names the wrong field."""

import itertools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.client.request import build
from baton.gateway import body_parser, error_responses, parsed_request, request_bodies
from baton.gateway.error_responses import HttpError
from baton.runtime.errors import RemoteError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
KINDS = {
    request_bodies.CompletionBody: (parsed_request.from_completion_body, {"prompt": "x"}),
    request_bodies.ChatBody: (
        parsed_request.from_chat_body,
        {"messages": [{"role": "user", "content": "x"}]},
    ),
}


def fields(kind):
    names = [field.alias or name for name, field in kind.model_fields.items()]
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=8), VALUES, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_json_becomes_requests_or_an_http_error(kind, data):
    convert, least = KINDS[kind]
    body = json.dumps({**least, **data.draw(fields(kind))}).encode()
    outcome = submitted(body, kind, convert)
    if outcome is not None:
        assert outcome.status == 400
        assert json.loads(outcome.body())["error"]["message"] == str(outcome) != ""


def submitted(body, kind, convert):
    """Returns the error of a body; None if it becomes requests."""
    try:
        request = convert(body_parser.parse_body(body, kind), "id", {})
        for prompt, options in itertools.islice(request.choice_requests(), 4):
            build(prompt, options)
    except HttpError as problem:
        return problem
    except RemoteError as error:
        # A value that the protobuf message cannot hold.
        return error_responses.from_remote_error(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
@given(body=st.binary(max_size=64))
def test_random_bytes_are_an_http_error(kind, body):
    with pytest.raises(HttpError) as caught:
        body_parser.parse_body(body, kind)
    assert caught.value.status == 400


MANY = 5000
MANY_WRONG = {
    "messages": [1] * MANY,
    "logit_bias": {str(index): "" for index in range(MANY)},
    "response_format": {"type": "text", **{f"x{index}": 1 for index in range(MANY)}},
    "structured_outputs": {"choice": [1] * MANY},
    **dict.fromkeys(("stop", "bad_words"), [1] * MANY),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), [""] * MANY),
}


@pytest.mark.parametrize("name", MANY_WRONG)
def test_only_the_first_of_many_wrong_entries_is_reported(name):
    """Describing every entry of the largest body would block the event loop for minutes."""
    least = KINDS[request_bodies.ChatBody][1]
    with pytest.raises(ValidationError) as caught:
        request_bodies.ChatBody.model_validate({**least, name: MANY_WRONG[name]})
    # A union reports one error per member.
    assert caught.value.error_count() <= 2
    with pytest.raises(HttpError, match=f"^{name}"):
        body_parser.parse_body(
            json.dumps({**least, name: MANY_WRONG[name]}).encode(), request_bodies.ChatBody
        )


@pytest.mark.parametrize("above", [None, "structured_outputs", "logit_bias"])
def test_long_field_names_are_shortened_in_errors(above):
    wrong = {"n" * MANY: ""}
    body = {"prompt": "x"} | (wrong if above is None else {above: wrong})
    with pytest.raises(HttpError) as caught:
        body_parser.parse_body(json.dumps(body).encode(), request_bodies.CompletionBody)
    assert "n" * 60 in caught.value.param
    assert len(caught.value.body()) < 1000


def test_the_number_of_turns_is_limited():
    turns = [{"role": "user", "content": "x"}] * MANY
    with pytest.raises(HttpError, match=r"^messages is .*at most 4096"):
        body_parser.parse_body(json.dumps({"messages": turns}).encode(), request_bodies.ChatBody)


@given(name=st.sampled_from(sorted(body_parser.UNSUPPORTED)), value=VALUES)
def test_an_unsupported_field_is_named_unless_it_has_no_effect(name, value):
    body = json.dumps({**KINDS[request_bodies.ChatBody][1], name: value}).encode()
    if value is None or value in body_parser.UNSUPPORTED[name]:
        body_parser.parse_body(body, request_bodies.ChatBody)
        return
    with pytest.raises(HttpError) as caught:
        body_parser.parse_body(body, request_bodies.ChatBody)
    assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


def turns_of(*turns):
    """The turns of a chat for the chat template."""
    body = json.dumps({"messages": turns}).encode()
    chat = body_parser.parse_body(body, request_bodies.ChatBody)
    return [one.turn() for one in chat.messages]


def test_several_texts_of_a_turn_stay_parts():
    """Only the coordinator knows whether the chat template reads parts."""
    turn = {"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]}
    (made,) = build(turns_of(turn), {}).chat.messages
    assert (made.content, [part.text for part in made.parts]) == ("", ["a", "b"])
    turn["content"].pop()
    (made,) = build(turns_of(turn), {}).chat.messages
    assert (made.content, len(made.parts)) == ("a", 0)


def test_answers_of_other_servers_can_be_sent_back_as_turns():
    """LiteLLM, OpenRouter, Gemini and OpenAI's own helpers have fields that Baton does not have."""
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "c", "type": "function", "function": function}
    unread = {"provider_specific_fields": {"refusal": None}}
    told_call = {
        **call,
        **unread,
        "type": None,
        "index": 0,
        "extra_content": {"google": {}},
        "function": {**function, **unread, "parsed_arguments": {}},
    }
    told = {
        **unread,
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [told_call],
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "cache_control": {"type": "ephemeral"},
        "copilot_cache_control": {"type": "ephemeral"},
        "function_call": None,
        "parsed": {"a": 1},
        "reasoning_details": [{"text": "Hm."}],
        "thinking_blocks": [{"thinking": "Hm."}],
    }
    read = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert turns_of(told) == [read | {"reasoning": "Hm.", "reasoning_content": "Hm."}]


def test_a_mark_for_a_cache_is_no_part_of_a_tool():
    """Clients of Anthropic's models mark the last tool."""
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "description": None, "parameters": {}}
    body = {"messages": [{"role": "user", "content": "a"}]}
    body["tools"] = [{"type": "function", "function": {**function, **mark}, **mark}]
    chat = body_parser.parse_body(json.dumps(body).encode(), request_bodies.ChatBody)
    assert [tool.template_tool() for tool in chat.tools] == [
        {"type": "function", "function": function}
    ]


def test_a_refusal_is_the_text_of_its_turn():
    text = {"role": "assistant", "content": "No."}
    part = {"type": "refusal", "refusal": "No."}
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    assert turns_of(refused, {"role": "assistant", "content": [part]}) == [text, text]


def test_unknown_fields_of_turns_are_refused():
    with pytest.raises(HttpError, match=r"^messages\[0\].prefix is True"):
        turns_of({"role": "assistant", "content": "a", "prefix": True})
